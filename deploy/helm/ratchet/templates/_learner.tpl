{{- /* The pod of a learner's machine, alone in a StatefulSet or one of several in a JobSet. */}}
{{- define "ratchet.learnerPod" -}}
{{- $several := gt (int .Values.learner.machines) 1 -}}
metadata:
  labels: {{ include "ratchet.labels" "learner" }}
  {{ include "ratchet.checksum" (list $ "vllm" "proxy" "trainer" "tuner" "model_list") }}
spec:
  {{- include "ratchet.pod" (list $ "learner") | nindent 2 }}
  {{- if $several }}
  restartPolicy: Never # the JobSet restarts all machines
  {{- end }}
  terminationGracePeriodSeconds: 60
  containers:
    - name: learner
      image: {{ include "ratchet.image" (list $ "trainer") }}
      command: [ratchet, --config, /etc/ratchet/ratchet.yaml, learner]
      env:
        - name: RATCHET_LEARNER_TOKEN
          valueFrom: {secretKeyRef: {name: {{ .Values.secrets.learner }}, key: token}}
        - {name: HF_HOME, value: /state/hub}
        - {name: TRITON_CACHE_DIR, value: /state/triton}
        - {name: DO_NOT_TRACK, value: "1"}
        {{- if $several }}
        - {name: RATCHET_LEARNER__MACHINES, value: {{ .Values.learner.machines | quote }}}
        - {name: RATCHET_LEARNER__LEADER, value: learner-machine-0-0.learner-machines}
        {{- end }}
        {{- with .Values.learner.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      envFrom:
        {{- with .Values.secrets.objectStore }}
        - secretRef: {name: {{ . }}}
        {{- end }}
        - secretRef: {name: {{ .Values.secrets.hub }}, optional: true} # HF_TOKEN
      ports: [{name: http, containerPort: 8002}]
      {{- if not $several }}
      # /health is 503 while the base model loads.
      startupProbe: {httpGet: {path: /health, port: http}, periodSeconds: 10, failureThreshold: 360}
      livenessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 30, timeoutSeconds: 10, failureThreshold: 6}
      readinessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 5, timeoutSeconds: 5}
      {{- end }}
      {{- include "ratchet.container" (list $ "learner") | nindent 6 }}
      volumeMounts:
        - {name: state, mountPath: /state}
        - {name: settings, mountPath: /etc/ratchet, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
  volumes:
    {{- if $several }}
    - name: state # the base model, and copies of versions
      ephemeral:
        volumeClaimTemplate:
          spec: {{- include "ratchet.claimSpec" .Values.learner.storage | nindent 12 }}
    {{- end }}
    - name: settings
      configMap: {name: settings}
    - name: tmp
      emptyDir: {sizeLimit: 10Gi}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ .Values.learner.shmSize }}}
{{- end }}
