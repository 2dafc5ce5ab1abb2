#!/usr/bin/env bash
# OUT=FOLDER bash benchmarks/gpu/half_hour.sh few-bits|pairs|kills: what runs next on a lent machine of two cards.
# CAMPAIGN.md says which parts travel with each, and why so. Whoever has something to measure writes it in here.
set -euo pipefail
cd "$(dirname "$0")/../.."

campaign='python3 -m benchmarks.gpu.campaign --tokenizer /tmp/site/tokenizer --budget-s $LEFT_S'
few_bits='tests/gpu/test_quantised_products.py tests/gpu/test_quantised_card_linear.py tests/gpu/test_fp8_kv.py'
few_bits+=' tests/gpu/test_weights_ahead.py tests/gpu/test_settled_context.py'
trials='fetch-by-line,context-ahead,weights-ahead,int4-by-byte,quant-kernels' # 130 + 150 + 95 + 60 + 65 s

on_cards() { # LIMIT_S COMMAND ...
    python3 -m benchmarks.gpu.card_commands --out "$OUT" --limit-s "$@"
}

case $1 in
    few-bits)
        python3 -m benchmarks.gpu.parcels.unpack .gpu --needs site
        drafts='speculative-plain,speculative,speculative-eagle3,speculative-oracle,speculative-oracle-fp8'
        on_cards 560 \
            "0 120 python3 -m pytest -q -rA $few_bits" \
            "0 560 $campaign --only $trials --state /tmp/0.jsonl --out \$OUT/0" \
            "1 560 $campaign --only $drafts --state /tmp/1.jsonl --out \$OUT/1"
        ;;
    pairs)
        python3 -m benchmarks.gpu.parcels.unpack .gpu --needs site vllm
        load='--most-runs 2 --vllm-site /tmp/vllm-site'
        on_cards 565 \
            "0,1 320 $campaign --only pair-roles --workloads 2048/128,8192/256 $load --state /tmp/2.jsonl --out \$OUT/2" \
            "0,1 565 $campaign --only pair-vllm,pair-split --workloads 8192/256 $load --state /tmp/3.jsonl --out \$OUT/3"
        ;;
    kills)
        python3 -m benchmarks.gpu.parcels.unpack .gpu --needs site model
        steps='steps-fp8,steps-fp8-kv,steps-int4,cache-steps'
        on_cards 430 \
            '0 430 python3 -m pytest -v -s tests/gpu/test_killed_on_a_card.py' \
            '1 300 python3 -m pytest -v tests/gpu/test_moved_on_a_card.py' \
            "1 430 $campaign --only $steps --state /tmp/1.jsonl --out \$OUT/1"
        ;;
    *)
        echo "few-bits, pairs or kills, not $1" >&2
        exit 2
        ;;
esac
