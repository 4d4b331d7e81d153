# Sourced: uv reads pip's settings PIP_INDEX_URL and PIP_EXTRA_INDEX_URL unless it has its own.
export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}}"
[ -n "$UV_DEFAULT_INDEX" ] || unset UV_DEFAULT_INDEX
export UV_INDEX="${UV_INDEX:-${PIP_EXTRA_INDEX_URL:-}}"
[ -n "$UV_INDEX" ] || unset UV_INDEX
