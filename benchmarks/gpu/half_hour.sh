#!/usr/bin/env bash
# OUT=FOLDER bash benchmarks/gpu/half_hour.sh CALL: what runs next on a lent machine, of one card (one-card,
# one-card-vllm) or of two (pairs, saturated, vllm).
# CAMPAIGN.md says which parts travel with each, and why so. Whoever has something to measure writes it in here.
set -euo pipefail
cd "$(dirname "$0")/../.."

campaign='python3 -m benchmarks.gpu.campaign --tokenizer /tmp/site/tokenizer --budget-s $LEFT_S'

on_cards() { # LIMIT_S COMMAND ...
    python3 -m benchmarks.gpu.card_commands --out "$OUT" --limit-s "$@"
}

case $1 in
    one-card)
        python3 -m benchmarks.gpu.parcels.unpack .gpu --needs site
        tests='tests/gpu/test_rotated_decode.py tests/gpu/test_piece_weighing.py tests/gpu/test_gated_products.py'
        tests="$tests tests/gpu/test_gated_layer.py tests/gpu/test_int4_gemv.py tests/gpu/test_speculative_runner.py"
        pieces='steps-bf16,steps-int4,steps-fp8,steps-fp8-kv,kernels-int4,steps-70b' # 4 x 65 + 40 + 65 s
        on_cards 570 \
            "0 150 python3 -m pytest -q -n 14 $tests" \
            "0 410 $campaign --only $pieces --state /tmp/0.jsonl --out \$OUT/0"
        ;;
    one-card-vllm)
        python3 -m benchmarks.gpu.parcels.unpack .gpu --needs site vllm
        pieces='vllm-fp8,steps-fp8,vllm-fp8-kv,vllm-awq,steps-int4' # 3 x 125 + 2 x 80 s
        on_cards 560 "0 560 $campaign --only $pieces --vllm-site /tmp/vllm-site --state /tmp/1.jsonl --out \$OUT/1"
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
            "0,1 570 $campaign --only pair-vllm-4096,pair-vllm-split,pair-vllm-16384 $sites --state /tmp/7.jsonl --out \$OUT/7"
        ;;
    *)
        echo "one-card, one-card-vllm, pairs, saturated or vllm, not $1" >&2
        exit 2
        ;;
esac
