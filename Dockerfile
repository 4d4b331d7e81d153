# Two images from one file:
#   docker build --target proxy   -t ratchet-proxy .      the front door, without torch
#   docker build --target trainer -t ratchet-trainer .    the school; vLLM runs in its own image (vllm/vllm-openai)
# The checkpoints folder must be a volume that trainer and vLLM share under the same path.

FROM python:3.12-slim AS proxy
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY store store
COPY proxy proxy
COPY trainer trainer
COPY ratchet ratchet
COPY examples/__init__.py examples/__init__.py
RUN pip install --no-cache-dir ".[postgres]" && useradd --create-home ratchet && mkdir /state && chown ratchet /state
USER ratchet
WORKDIR /state
VOLUME /state
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/live', timeout=3)"]
# Outside its container the proxy is reached through 0.0.0.0, which needs RATCHET_API_KEYS.
ENTRYPOINT ["ratchet", "proxy", "--host", "0.0.0.0", "--port", "8000"]

FROM proxy AS trainer
USER root
RUN pip install --no-cache-dir "/app[postgres,trainer]"
USER ratchet
HEALTHCHECK NONE
ENTRYPOINT ["ratchet", "trainer"]
