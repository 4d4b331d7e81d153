#!/bin/sh
# Test the base package with the lowest versions that pyproject.toml allows: deploy/lowest.sh VENV.
#
# Proxy, store and command line, without torch. uv comes from VENV; the environment of the tests is temporary.
set -eu

uv=$1/bin/uv
python=$1/bin/python
. deploy/index.sh

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$uv" pip compile --quiet --python "$python" --resolution lowest-direct --output-file "$folder/lowest.txt" pyproject.toml
"$uv" venv --quiet --python "$python" "$folder/venv"
"$uv" pip install --quiet --python "$folder/venv" --requirement "$folder/lowest.txt" \
    aiohttp anthropic gepa google-re2 hypothesis llm-comply matplotlib openai \
    opentelemetry-exporter-otlp-proto-http opentelemetry-sdk "psycopg[binary]" pytest pytest-asyncio pytest-xdist trustme
"$uv" pip install --quiet --python "$folder/venv" --no-deps --editable .

# Left out: what needs Playwright, Schemathesis, torch, the hub's client, the Agents SDK or vLLM.
"$folder/venv/bin/python" -m pytest -q -n "${TEST_WORKERS:-4}" --dist worksteal -p no:cacheprovider \
    -m "not (alone or browser or clients or e2e or postgres or slow)" \
    --ignore tests/proxy/console --ignore tests/proxy/test_hostile.py \
    --ignore tests/ratchet/test_tune_weights.py \
    --deselect tests/proxy/test_dialects.py::test_an_agent_of_the_agents_sdk_completes_its_loop \
    --deselect tests/ratchet/test_base_model.py::test_an_unknown_hub_name_fails_before_anything_starts \
    --deselect tests/ratchet/test_base_model.py::test_an_unreachable_hub_is_reported \
    --deselect tests/ratchet/test_base_model.py::test_up_notes_that_it_uses_a_hub_name \
    --deselect tests/ratchet/test_first_hours.py::test_a_tool_call_parser_that_vllm_does_not_know_is_named_with_those_that_it_knows \
    tests/proxy tests/store tests/ratchet
