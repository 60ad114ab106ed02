"""The exchange with Envoy: a sans-I/O state machine of one stream, and the gRPC shell around it."""
