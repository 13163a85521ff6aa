# The verbs that use a model, compared between GPU and CPU: a part of gpu.sh, which sources it.
# shellcheck shell=bash disable=SC2154

# The numbers of a key of JSON lines, in millionths.
millionths() { # file, key
    local numbers LC_ALL=C
    mapfile -t numbers < <(sed -n 's/.*"'"$2"'":\[*\([^]}]*\).*/\1/p' "$1" | tr ',' '\n' | grep .)
    [ "${#numbers[@]}" -gt 0 ] || return 0
    printf '%.6f\n' "${numbers[@]}" | sed 's/\.//; s/^\(-*\)0*\([0-9]\)/\1\2/'
}

# The number of values in two files, and their largest difference, in millionths.
apart() { # file, file, key
    local a b i gap most=0
    mapfile -t a < <(millionths "$1" "$3")
    mapfile -t b < <(millionths "$2" "$3")
    [ "${#a[@]}" = "${#b[@]}" ] || return
    for i in "${!a[@]}"; do
        gap=$((a[i] - b[i]))
        [ "${gap#-}" -le "$most" ] || most=${gap#-}
    done
    echo "${#a[@]} $most"
}

# Results of the actor and the critic of the first job, compared between GPU and CPU. bf16 may change a number by at
# most a quarter. The tests of whole jobs have a tighter bound, for a known model.
verbs() {
    local job=$work/quickstart/work/one-rank-exact-gemms at=$work/verbs from=$SECONDS failures_of_verbs=0 device verb count most gap
    local rows=64 new=32 furthest=250000 words= alike=0 a b i
    section "Verbs on the GPU, compared with the CPU"
    [ -d "$job/export" ] || { skipped "Verbs" "the first job exported no model" && return; }
    is_time_for "Verbs" 20 || return
    mkdir -p "$at"
    grep -m "$rows" '"split":"eval"' "$work/quickstart/work/arithmetic.jsonl" >"$at/ask"
    verb() { # seconds, name of the answers, verb and options...
        try "$1" "$at/log-$2" bash -c '"${@:2}" >"$1"' - "$at/$2" "$here/rlhf-hpc" "${@:3}"
        [ "$code" = 0 ] || failures_of_verbs=$code
    }
    verb 20 exported export "$job" --out "$at/critic" --role critic
    for device in gpu cpu; do
        verb 30 "generate-$device" generate --device "$device" --model "$job/export" --input "$at/ask" --max-new-tokens "$new" --seed 1
    done
    for device in gpu cpu; do
        # The GPU's responses, on both.
        verb 30 "logprobs-$device" logprobs --device "$device" --model "$job/export" --input "$at/generate-gpu"
        verb 30 "reward-$device" reward --device "$device" --model "$at/critic" --input "$at/generate-gpu"
    done
    mapfile -t a < <(sed 's/,"text".*//' "$at/generate-gpu")
    mapfile -t b < <(sed 's/,"text".*//' "$at/generate-cpu")
    for i in "${!a[@]}"; do [ "${a[i]}" != "${b[i]:-}" ] || alike=$((alike + 1)); done
    say "Responses on the GPU: ${#a[@]}; equal to the CPU's: $alike (samples near a boundary may differ)."
    for verb in logprobs reward; do
        read -r count most < <(apart "$at/$verb-gpu" "$at/$verb-cpu" "$verb")
        if [ "${count:-0}" = 0 ]; then
            words="$words, no $verb"
            failures_of_verbs=1
            continue
        fi
        gap=$(printf '%d.%06d' $((most / 1000000)) $((most % 1000000)))
        words="$words, $verb differ by at most $gap"
        say "$verb: $count numbers, differ by at most $gap."
        [ "$most" -le "$furthest" ] || failures_of_verbs=1
    done
    block "$(cat "$at"/log-* | cut -c1-200)"
    code=$failures_of_verbs ended=$(how_it_ended "$failures_of_verbs") took=$((SECONDS - from))
    result "Verbs" "${words#, }"
}
