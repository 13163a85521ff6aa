# Lines of `round, who, size, task, JSON` (tabs) to the table of a run, or with rounds_csv=1 to one row a line.

function field(json, key,    at, rest) {
    at = index(json, "\"" key "\":")
    if (!at) return ""
    rest = substr(json, at + length(key) + 3)
    sub(/^ */, "", rest)
    if (substr(rest, 1, 1) == "\"") { rest = substr(rest, 2); sub(/".*/, "", rest) } else sub(/[,}].*/, "", rest)
    return rest == "null" ? "" : rest
}

function median(list,    n, parts, i, j, swap) {
    n = split(list, parts, " ")
    if (!n) return ""
    for (i = 2; i <= n; i++)
        for (j = i; j > 1 && parts[j - 1] + 0 > parts[j] + 0; j--) { swap = parts[j]; parts[j] = parts[j - 1]; parts[j - 1] = swap }
    return n % 2 ? parts[(n + 1) / 2] : (parts[n / 2] + parts[n / 2 + 1]) / 2
}

function target(size, dtype, task,    key) {
    key = size " " task
    if (dtype == "bf16") return "1 x torch bf16"
    if (key == "tiny sampling") return "6 x torch"
    if (key == "tiny train") return "2 x torch"
    if (key == "tiny ppo") return "2.5 x torch"
    if (key == "small sampling") return "50 % of bound"
    if (key == "small train") return "75 % of peak"
    if (key == "small ppo") return "70 % of bound"
    if (task == "logprobs") return "1 x torch, 64 MB"
    return ""
}

BEGIN {
    if (rounds_csv)
        print "round,who,size,task,dtype,threads,median_s,tokens_per_s,share,bound,bound_s,peak_gflops,read_gbs,parts"
}

{
    task = $4
    if (task == "rollout") task = $2 == "ours" && index(field($5, "work"), "greedy") ? "greedy" : "sampling"
    dtype = field($5, "dtype")
    seconds = field($5, "median_s")
    if (rounds_csv) {
        parts = ""
        split("forward_ms head_ms backward_ms update_ms rollout_ms reference_ms values_ms advantage_ms logprob_gap_max arena_beyond_mb resident_beyond_mb attention chunk", names, " ")
        for (i = 1; i in names; i++) {
            value = field($5, names[i])
            if (value != "") parts = parts (parts == "" ? "" : "; ") names[i] " " value
        }
        printf "%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s\n", $1, $2, $3, task, dtype, field($5, "threads"), seconds,
            field($5, "tokens_per_s"), field($5, "share"), field($5, "bound"), field($5, "bound_s"),
            field($5, "peak_gflops"), field($5, "read_gbs"), parts
        next
    }
    key = $3 "\t" dtype "\t" task
    if (!(key in seen)) { seen[key] = 1; order[++keys] = key }
    times[key, $2] = times[key, $2] " " seconds
    rates[key, $2] = rates[key, $2] " " field($5, "tokens_per_s")
    if ($2 == "ours") {
        shares[key] = shares[key] " " field($5, "share")
        bound[key] = field($5, "bound")
        peaks = peaks " " (dtype == "f32" ? field($5, "peak_gflops") : "")
        half = half " " (dtype == "bf16" ? field($5, "peak_gflops") : "")
        reads = reads " " field($5, "read_gbs")
        if (field($5, "arena_beyond_mb") != "") memory[key] = field($5, "resident_beyond_mb")
        if (field($5, "logprob_gap_max") + 0 > gap) gap = field($5, "logprob_gap_max") + 0
    }
}

END {
    if (rounds_csv) exit
    line = "Peaks between the runs: f32 " sprintf("%.0f", median(peaks)) " GFLOP/s"
    if (median(half) != "") line = line ", bf16 " sprintf("%.0f", median(half)) " GFLOP/s"
    print line ", memory read " sprintf("%.0f", median(reads)) " GB/s. Largest logprob gap in the PPO steps: " gap + 0 ".\n"
    print "| model | dtype | work | ours, s | tokens/s | share of bound | torch, s | tokens/s | torch / ours | target |"
    print "|---|---|---|---|---|---|---|---|---|---|"
    for (i = 1; i <= keys; i++) {
        key = order[i]
        split(key, part, "\t")
        mine = median(times[key, "ours"]); other = median(times[key, "torch"])
        note = key in memory ? sprintf(" (%.0f MB beyond)", memory[key]) : ""
        printf "| %s | %s | %s | %.3f%s | %.0f | %.0f %% %s | %s | %s | %s | %s |\n", part[1], part[2], part[3], mine, note,
            median(rates[key, "ours"]), 100 * median(shares[key]), bound[key],
            other == "" ? "" : sprintf("%.3f", other), other == "" ? "" : sprintf("%.0f", median(rates[key, "torch"])),
            other == "" || !mine ? "" : sprintf("%.2f", other / mine), target(part[1], part[2], part[3])
    }
    for (i = 1; i <= keys; i++) {
        split(order[i], part, "\t")
        f32 = part[1] "\tf32\tsampling"
        if (part[2] == "bf16" && part[3] == "sampling" && (f32 in seen))
            printf "\n%s: sampling in bf16 is %.2f x our f32 (target 1.5 x for small).\n", part[1],
                median(times[f32, "ours"]) / median(times[order[i], "ours"])
    }
}
