{{- define "ratchet.labels" -}}
{app.kubernetes.io/name: {{ . }}, app.kubernetes.io/part-of: ratchet}
{{- end }}

{{- define "ratchet.image" -}}
{{- $image := index (index . 0).Values.images (index . 1) -}}
{{ $image.repository }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
{{- end }}

{{- /* (list $ WORKLOAD ANNOTATIONS) */}}
{{- define "ratchet.serviceAccount" -}}
{{- $name := index . 1 -}}
{{- $annotations := merge (dict) (index . 2) ((index (index . 0).Values $name).serviceAccountAnnotations | default dict) -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  labels: {{ include "ratchet.labels" $name }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{- /* What all pods have, at the start of a pod's spec: (list $ WORKLOAD) */}}
{{- define "ratchet.pod" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (index . 1) -}}
serviceAccountName: {{ index . 1 }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $own $key }}
{{ $key }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* What all containers have, after their own fields: (list $ WORKLOAD) */}}
{{- define "ratchet.container" -}}
resources: {{- toYaml (index (index . 0).Values (index . 1)).resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* A proxy's time to stop: until it is out of the Service, for its running calls, and 50 s to write and ship them. */}}
{{- define "ratchet.graceSeconds" -}}
{{- $proxy := .Values.settings.proxy | default dict -}}
{{- add (ceil ($proxy.drain_delay_seconds | default 0)) (ceil ($proxy.drain_timeout_seconds | default 30)) 50 | max 90 -}}
{{- end }}

{{- /* The replicas should not share a node. */}}
{{- define "ratchet.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {app.kubernetes.io/name: {{ . }}}}
{{- end }}

{{- /* (list NAME STORAGE) */}}
{{- define "ratchet.claim" -}}
- metadata: {name: {{ index . 0 }}}
  spec: {{- include "ratchet.claimSpec" (index . 1) | nindent 4 }}
{{- end }}

{{- define "ratchet.claimSpec" -}}
accessModes: [ReadWriteOnce]
{{- with .storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}

{{- /* Restarts pods when settings change, but for agents, which are followed: (list $ SECTION-OF-OTHERS ...) */}}
{{- define "ratchet.checksum" -}}
{{- $read := omit (first .).Values.settings "agents" -}}
{{- range rest . }}{{ $read = omit $read . }}{{ end -}}
annotations: {checksum/settings: {{ toJson $read | sha256sum }}}
{{- end }}

{{- /* vLLM's replicas, as JSON. */}}
{{- define "ratchet.vllmUrls" -}}
{{- if .Values.vllm.enabled -}}
["dns+http://vllm:8000"]
{{- else -}}
{{ toJson .Values.vllm.urls }}
{{- end -}}
{{- end }}

{{- define "ratchet.proxyEnvironment" -}}
- name: RATCHET_STORE
  valueFrom: {secretKeyRef: {name: {{ .Values.secrets.store }}, key: url}}
- name: RATCHET_API_KEYS
  valueFrom: {secretKeyRef: {name: {{ .Values.secrets.keys }}, key: agents}}
- name: RATCHET_OPERATOR_KEYS
  valueFrom: {secretKeyRef: {name: {{ .Values.secrets.keys }}, key: operators}}
- name: RATCHET_COORDINATOR_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.secrets.coordinator }}, key: token}}
{{- end }}
