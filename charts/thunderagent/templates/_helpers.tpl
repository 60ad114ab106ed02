{{- define "thunderagent.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "thunderagent.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "thunderagent.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "thunderagent.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "thunderagent.operatorName" -}}
{{- printf "%s-operator" (include "thunderagent.fullname" .) -}}
{{- end -}}

{{- define "thunderagent.serviceAccountName" -}}
{{- with .Values.operator.serviceAccount -}}
{{- if .name -}}
{{- .name -}}
{{- else -}}
{{- include "thunderagent.operatorName" $ -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels of every object; root and component are given. */}}
{{- define "thunderagent.labels" -}}
{{ include "thunderagent.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: thunderagent
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "thunderagent.selectorLabels" -}}
app.kubernetes.io/name: {{ include "thunderagent.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
thunderagent.io/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "thunderagent.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "thunderagent.podSecurityContext" -}}
runAsNonRoot: true
{{- with .Values.runAsUser }}
runAsUser: {{ int64 . }}
runAsGroup: {{ int64 . }}
fsGroup: {{ int64 . }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "thunderagent.securityContext" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* What a user adds to a container's arguments and environment. */}}
{{- define "thunderagent.extraArgs" -}}
{{- range .extraArgs }}
- {{ quote . }}
{{- end }}
{{- end -}}

{{/* Where pods go, from the settings of a component. */}}
{{- define "thunderagent.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/*
Every pool as its templates see it, with the defaults of `epp` and `standalone` and the names of its objects, as JSON
under "pools": what several templates need is worked out once, here.
*/}}
{{- define "thunderagent.pools" -}}
{{- $pools := list -}}
{{- range $index, $entry := .Values.pools -}}
  {{- $pool := mergeOverwrite (deepCopy $.Values.epp) (deepCopy $entry) -}}
  {{- $_ := set $pool "index" $index -}}
  {{- $_ := set $pool "namespace" (default $.Release.Namespace $entry.namespace) -}}
  {{- $_ := set $pool "fullname" (printf "%s-%s-epp" (include "thunderagent.fullname" $) $entry.name) -}}
  {{- $_ := set $pool "standalone" (mergeOverwrite (deepCopy $.Values.standalone) (dict "enabled" false) (default dict $entry.standalone | deepCopy)) -}}
  {{- $_ := set $pool "inferencePool" (mergeOverwrite (dict "create" (not $pool.standalone.enabled) "selector" dict "targetPorts" list "failureMode" "FailClose") (default dict $entry.inferencePool | deepCopy)) -}}
  {{- $policy := mergeOverwrite (dict "create" true "name" "" "spec" dict) (default dict $entry.policy | deepCopy) -}}
  {{- if not $policy.name -}}{{- $_ := set $policy "name" $entry.name -}}{{- end -}}
  {{- $workers := default dict $policy.spec.workers -}}
  {{- if and $pool.inferencePool.create (not $workers.inferencePool) (not $workers.selector) -}}
    {{- $_ := set $policy.spec "workers" (merge (dict "inferencePool" $entry.name) $workers) -}}
  {{- end -}}
  {{- $_ := set $pool "policy" $policy -}}
  {{- $secret := printf "%s-tls" $pool.fullname -}}
  {{- if eq $.Values.tls.mode "existing" -}}{{- $secret = dig "tls" "secretName" "" $entry -}}{{- end -}}
  {{- $_ := set $pool "secretName" $secret -}}
  {{- $pools = append $pools $pool -}}
{{- end -}}
{{- dict "pools" $pools | toJson -}}
{{- end -}}

{{- define "thunderagent.operatorSecretName" -}}
{{- if eq .Values.tls.mode "existing" -}}
{{- .Values.tls.existing.operatorSecretName -}}
{{- else -}}
{{- printf "%s-tls" (include "thunderagent.operatorName" .) -}}
{{- end -}}
{{- end -}}

{{- define "thunderagent.feedAddress" -}}
{{- if .Values.operator.enabled -}}
{{- printf "%s.%s.svc:9004" (include "thunderagent.operatorName" .) .Release.Namespace -}}
{{- else -}}
{{- .Values.feed.address -}}
{{- end -}}
{{- end -}}

{{/* The names of a Service, as JSON under "names"; name, namespace and root are given. */}}
{{- define "thunderagent.serviceNames" -}}
{{- $svc := printf "%s.%s.svc" .name .namespace -}}
{{- dict "names" (list .name (printf "%s.%s" .name .namespace) $svc (printf "%s.%s" $svc .root.Values.clusterDomain) "localhost") | toJson -}}
{{- end -}}

{{- define "thunderagent.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  namespace: {{ .namespace }}
  labels: {{- include "thunderagent.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ .budget.maxUnavailable }}
  # A pod that is not ready keeps nobody's place.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "thunderagent.selectorLabels" . | nindent 6 }}
{{- end -}}

{{- define "thunderagent.dnsEgress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
    # What it is behind its Service, on OpenShift.
    - {port: 5353, protocol: UDP}
    - {port: 5353, protocol: TCP}
{{- end -}}

{{/* The output of `thunderagent envoy-config`, with the address it listens on. */}}
{{- define "thunderagent.envoyConfig" -}}
{{ .root.Files.Get "files/envoy.yaml" | replace "address: 0.0.0.0" (printf "address: %s" (quote .pool.standalone.listenAddress)) }}
{{- end -}}
