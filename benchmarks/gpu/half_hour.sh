#!/usr/bin/env bash
# OUT=FOLDER bash benchmarks/gpu/half_hour.sh few-bits|pairs|saturated|vllm: what runs next on a lent machine of two cards.
# CAMPAIGN.md says which parts travel with each, and why so. Whoever has something to measure writes it in here.
set -euo pipefail
cd "$(dirname "$0")/../.."

campaign='python3 -m benchmarks.gpu.campaign --tokenizer /tmp/site/tokenizer --budget-s $LEFT_S'
few_bits='tests/gpu/test_quantised_products.py tests/gpu/test_skinny_product.py'

on_cards() { # LIMIT_S COMMAND ...
    python3 -m benchmarks.gpu.card_commands --out "$OUT" --limit-s "$@"
}

case $1 in
    few-bits)
        python3 -m benchmarks.gpu.parcels.unpack .gpu --needs site
        steps='first-weights,steps-fp8,steps-int4,steps-fp8-kv'    # 110 + 3 x 50 s
        others='int4-parts,fp8-wide,steps-70b,colocated-saturated' # 40 + 40 + 110 + 90 s
        on_cards 350 \
            "0 60 python3 -m pytest -q -rA $few_bits" \
            "0 350 $campaign --only $steps --state /tmp/0.jsonl --out \$OUT/0" \
            "1 350 $campaign --only $others --state /tmp/1.jsonl --out \$OUT/1"
        ;;
    pairs)
        python3 -m benchmarks.gpu.parcels.unpack .gpu --needs site
        on_cards 570 \
            "0,1 210 $campaign --only pair-roles --workloads 512/512 --most-runs 2 --state /tmp/2.jsonl --out \$OUT/2" \
            "0,1 570 $campaign --only pair-roles-1280,pair-colocated --workloads 2048/128 --most-runs 2 --state /tmp/3.jsonl --out \$OUT/3"
        ;;
    saturated)
        python3 -m benchmarks.gpu.parcels.unpack .gpu --needs site
        on_cards 110 "0,1 110 $campaign --only pair-split-saturated --state /tmp/4.jsonl --out \$OUT/4"
        ;;
    vllm)
        python3 -m benchmarks.gpu.parcels.unpack .gpu --needs site vllm
        sites='--vllm-site /tmp/vllm-site --most-runs 2 --workloads 2048/128'
        on_cards 570 \
            "0 140 $campaign --only vllm-fp8 $sites --state /tmp/5.jsonl --out \$OUT/5" \
            "1 140 $campaign --only vllm-fp8-kv $sites --state /tmp/6.jsonl --out \$OUT/6" \
            "0,1 570 $campaign --only pair-vllm-4096,pair-vllm-split,pair-vllm-16384 $sites --state /tmp/7.jsonl --out \$OUT/7"
        ;;
    *)
        echo "few-bits, pairs, saturated or vllm, not $1" >&2
        exit 2
        ;;
esac
