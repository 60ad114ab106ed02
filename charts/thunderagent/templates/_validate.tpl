{{/*
What values.schema.json cannot say: relations between values. Each fault names its value.
*/}}
{{- define "thunderagent.validate" -}}
{{- if and (not .Values.operator.enabled) .Values.pools (not .Values.feed.address) -}}
  {{- fail "feed.address: needed with operator.enabled false, HOST:PORT of the operator the pickers follow" -}}
{{- end -}}
{{- if and .Values.operator.enabled .Values.feed.address -}}
  {{- fail "feed.address: goes with operator.enabled false only" -}}
{{- end -}}
{{- if and (not .Values.operator.enabled) .Values.pools (eq .Values.tls.mode "selfSigned") -}}
  {{- fail "tls.mode: with operator.enabled false the pickers need certificates the other operator trusts: certManager, existing or disabled" -}}
{{- end -}}
{{- if and (not .Values.operator.enabled) .Values.pools (eq .Values.tls.mode "certManager") (not .Values.tls.certManager.issuerRef.name) -}}
  {{- fail "tls.certManager.issuerRef.name: with operator.enabled false the issuer must be the other operator's" -}}
{{- end -}}
{{- if and (eq .Values.tls.mode "existing") .Values.operator.enabled (not .Values.tls.existing.operatorSecretName) -}}
  {{- fail "tls.existing.operatorSecretName: needed with tls.mode existing" -}}
{{- end -}}
{{- if and .Values.operator.enabled (not .Values.operator.serviceAccount.create) (not .Values.operator.serviceAccount.name) -}}
  {{- fail "operator.serviceAccount.name: needed with create false; rights are not given to a namespace's default account" -}}
{{- end -}}
{{- $seen := dict -}}
{{- range (include "thunderagent.pools" . | fromJson).pools -}}
  {{- $at := printf "pools[%d]" (int .index) -}}
  {{- $key := printf "%s/%s" .namespace .name -}}
  {{- if hasKey $seen $key -}}{{- fail (printf "%s.name: %s is there twice" $at $key) -}}{{- end -}}
  {{- $_ := set $seen $key true -}}
  {{- if gt (len .fullname) 58 -}}
    {{- fail (printf "%s.name: with the release's name it makes %s, which is longer than 58 characters" $at .fullname) -}}
  {{- end -}}
  {{- if and .standalone.enabled .plaintext -}}
    {{- fail (printf "%s.plaintext: the standalone Envoy speaks TLS to the picker" $at) -}}
  {{- end -}}
  {{- if .inferencePool.create -}}
    {{- if not .inferencePool.selector -}}{{- fail (printf "%s.inferencePool.selector: needed, the labels of the worker pods" $at) -}}{{- end -}}
    {{- if not .inferencePool.targetPorts -}}{{- fail (printf "%s.inferencePool.targetPorts: needed, the ports of the worker pods" $at) -}}{{- end -}}
  {{- end -}}
  {{- if .policy.create -}}
    {{- $workers := default dict .policy.spec.workers -}}
    {{- if eq (not $workers.inferencePool) (not $workers.selector) -}}
      {{- fail (printf "%s.policy.spec.workers: exactly one of inferencePool and selector is needed where the chart creates no InferencePool" $at) -}}
    {{- end -}}
    {{- if and $workers.selector (not $workers.targetPorts) -}}
      {{- fail (printf "%s.policy.spec.workers.targetPorts: needed with selector" $at) -}}
    {{- end -}}
    {{- $admission := default dict .policy.spec.admission -}}
    {{- $threshold := dig "pauseThreshold" 0.95 $admission | float64 -}}
    {{- range $name, $default := dict "pauseTarget" 0.8 "resumeHysteresis" 0.1 -}}
      {{- if gt (dig $name $default $admission | float64) $threshold -}}
        {{- fail (printf "%s.policy.spec.admission.%s: must not be above pauseThreshold" $at $name) -}}
      {{- end -}}
    {{- end -}}
    {{- if and (not (kindIs "invalid" .policy.spec.disaggregation)) (ne (default "Aggregated" .policy.spec.topology) "Disaggregated") -}}
      {{- fail (printf "%s.policy.spec.disaggregation: goes with topology Disaggregated only" $at) -}}
    {{- end -}}
    {{- if and $.Values.operator.enabled $.Values.operator.namespaces (not (has .namespace $.Values.operator.namespaces)) -}}
      {{- fail (printf "%s.namespace: %s is not among operator.namespaces" $at .namespace) -}}
    {{- end -}}
  {{- end -}}
  {{- if and (eq $.Values.tls.mode "existing") (not .secretName) -}}
    {{- fail (printf "%s.tls.secretName: needed with tls.mode existing" $at) -}}
  {{- end -}}
  {{- if and (eq $.Values.tls.mode "certManager") (ne .namespace $.Release.Namespace) (or (not $.Values.tls.certManager.issuerRef.name) (ne $.Values.tls.certManager.issuerRef.kind "ClusterIssuer")) -}}
    {{- fail (printf "%s.namespace: a pool outside of the release's namespace needs a ClusterIssuer in tls.certManager.issuerRef" $at) -}}
  {{- end -}}
{{- end -}}
{{- include "thunderagent.validateCrd" . -}}
{{- end -}}

{{/*
Helm installs what is in crds/ once and never looks at it again. So a CRD in the cluster that lacks a field of this
version is found here, by comparing the two, and named with what to run.
*/}}
{{- define "thunderagent.validateCrd" -}}
{{- if .Values.crds.check -}}
{{- with lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "thunderagentpolicies.thunderagent.io" -}}
  {{- $wanted := $.Files.Get "crds/thunderagent.io_thunderagentpolicies.yaml" | fromYaml -}}
  {{- $have := dict -}}
  {{- range .spec.versions -}}{{- if .storage -}}{{- $have = .schema.openAPIV3Schema -}}{{- end -}}{{- end -}}
  {{- $missing := include "thunderagent.missingFields" (dict "want" (first $wanted.spec.versions).schema.openAPIV3Schema "have" $have "path" "") -}}
  {{- if $missing -}}
    {{- fail (printf "the ThunderAgentPolicy CRD in the cluster is of an earlier version, it lacks%s. Upgrade it first: helm upgrade --install thunderagent-crds charts/thunderagent-crds --namespace %s --take-ownership (or set crds.check to false)" $missing $.Release.Namespace) -}}
  {{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fields, and values of an enumeration, that a schema wants and another has not. */}}
{{- define "thunderagent.missingFields" -}}
{{- $path := .path -}}
{{- $have := default dict .have.properties -}}
{{- $values := default list .have.enum -}}
{{- range default list .want.enum -}}
  {{- if not (has . $values) -}}{{- printf " %s=%v" (trimPrefix "." $path) . -}}{{- end -}}
{{- end -}}
{{- range $name, $field := default dict .want.properties -}}
  {{- $at := printf "%s.%s" $path $name -}}
  {{- if hasKey $have $name -}}
    {{- include "thunderagent.missingFields" (dict "want" $field "have" (get $have $name) "path" $at) -}}
  {{- else -}}
    {{- printf " %s" (trimPrefix "." $at) -}}
  {{- end -}}
{{- end -}}
{{- end -}}
