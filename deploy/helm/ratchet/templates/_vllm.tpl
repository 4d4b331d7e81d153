{{- /* The arguments of vLLM that `ratchet up` derives from the same settings (ratchet/supervisor/vllm_command.py). */}}
{{- define "ratchet.vllmArguments" -}}
{{- $settings := .Values.settings -}}
{{- $own := $settings.vllm -}}
{{- $parser := required "settings.vllm.tool_call_parser: name vLLM's parser for the tool calls of the base model, or none" $own.tool_call_parser -}}
{{- $wanted := int (dig "lora_r" 16 $settings.learner) -}}
{{- $rank := 512 -}}
{{- range list 320 256 128 64 32 16 }}{{ if ge . $wanted }}{{ $rank = . }}{{ end }}{{ end -}}
{{- $held := 0 -}}
{{- range $settings.agents }}
{{- $held = add $held 6 (dig "keep_loaded_adapters" (dig "keep_loaded_adapters" 2 $settings.trainer) (. | default dict)) }}
{{- end -}}
{{- $slots := int ($own.max_loras | default (min (max (mul 3 (len $settings.agents)) 4) 16)) -}}
{{- $cpu := int ($own.max_cpu_loras | default (max (mul 2 $slots) $held)) -}}
{{- if lt $cpu (int (max $slots $held)) }}
{{- fail (printf "settings.vllm.max_cpu_loras: %d is too small; set %d or more, or leave it out" $cpu (max $slots $held)) }}
{{- end -}}
- --model={{ $settings.base_model }}
- --served-model-name=base@0
- --host=0.0.0.0
- --port=8000
- --dtype={{ $own.dtype | default "auto" }}
- --enable-lora
- --max-lora-rank={{ $rank }}
- --max-loras={{ $slots }}
- --max-cpu-loras={{ $cpu }}
- --max-num-seqs={{ int64 ($own.max_num_seqs | default 256) }}
- --enable-scale-out
- --logprobs-mode=processed_logprobs
- --generation-config=vllm
- --disable-uvicorn-access-log
{{- with $own.max_model_len }}
- --max-model-len={{ int64 . }}
{{- end }}
{{- if ne $parser "none" }}
- --enable-auto-tool-choice
- --tool-call-parser={{ $parser }}
{{- end }}
{{- if not (has $own.reasoning_parser (list nil "" "none")) }}
- --reasoning-parser={{ $own.reasoning_parser }}
{{- end }}
{{- if gt (int $own.tensor_parallel_size) 1 }}
- --tensor-parallel-size={{ $own.tensor_parallel_size }}
{{- end }}
{{- with $own.gpu_memory_utilization }}
- --gpu-memory-utilization={{ . }}
{{- end }}
{{- range $own.extra_args }}
- {{ quote . }}
{{- end }}
{{- end }}
