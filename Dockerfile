# Three images from one file:
#   docker build --target proxy   -t ratchet-proxy .      the proxy, without torch
#   docker build --target trainer -t ratchet-trainer .    the trainer, with torch for NVIDIA GPUs (several GB)
#   docker build --target vllm    -t ratchet-vllm .       vLLM with the plug-in that loads adapters from object storage
# deploy/compose.yaml starts proxy, trainer and learner beside vLLM's own image (the release that pyproject.toml pins):
# there their state folder is a volume that vLLM mounts at the same path. The Helm chart (deploy/helm) uses all three.
# For a trainer without a GPU give --build-arg PIP_EXTRA_INDEX_URL with PyTorch's CPU index.

FROM python:3.12-slim-bookworm AS proxy
ENV PYTHONUNBUFFERED=1
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY deploy/constraints.txt /tmp/constraints.txt
COPY store store
COPY proxy proxy
COPY trainer trainer
COPY tuner tuner
COPY ratchet ratchet
# The pinned versions without their hashes: PyTorch's CPU index has another build of torch.
RUN sed -e '/--hash=/d' -e 's/ \\$//' /tmp/constraints.txt > constraints.txt \
    && pip install --no-cache-dir -c constraints.txt ".[postgres,redact,otel]" \
    && useradd --create-home --uid 10001 ratchet && mkdir /state && chown ratchet /state
# A number, for Kubernetes' runAsNonRoot.
USER 10001
WORKDIR /state
# State is in /state/default, unless RATCHET_PROJECT or RATCHET_STATE_DIR is set.
ENV RATCHET_STATE_DIR=/state
VOLUME /state
EXPOSE 8000
HEALTHCHECK --start-period=30s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/live', timeout=3)"]
# Listening on 0.0.0.0 requires RATCHET_API_KEYS or a key in the store.
ENTRYPOINT ["ratchet", "proxy", "--host", "0.0.0.0", "--port", "8000"]

FROM proxy AS trainer
ARG PIP_EXTRA_INDEX_URL
USER root
RUN pip install --no-cache-dir -c /app/constraints.txt "/app[postgres,redact,otel,s3,trainer]"
USER 10001
HEALTHCHECK NONE
ENTRYPOINT ["ratchet", "trainer"]

FROM vllm/vllm-openai:v0.32.0 AS vllm
USER root
COPY trainer/adapters/vllm_resolver /tmp/vllm_resolver
RUN uv pip install --system --no-cache "/tmp/vllm_resolver[s3]" && useradd --create-home --uid 10001 ratchet
USER 10001
