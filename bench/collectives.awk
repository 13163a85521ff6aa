# The lines of `bench collectives --json` to tables, or with csv=1 to one row a line.

function field(json, key,    at, rest) {
    at = index(json, "\"" key "\":")
    if (!at) return ""
    rest = substr(json, at + length(key) + 3)
    if (substr(rest, 1, 1) == "\"") { rest = substr(rest, 2); sub(/".*/, "", rest) } else sub(/[,}].*/, "", rest)
    return rest == "null" ? "" : rest
}

BEGIN {
    columns = split("op ranks bytes oversubscribed repeats calls ours_us mpi_us ours_gbs mpi_gbs ratio gather_us compute_us both_us hidden exposed_us core_share", names, " ")
    if (csv) for (i = 1; i <= columns; i++) printf "%s%s", names[i], i < columns ? "," : "\n"
}

csv {
    for (i = 1; i <= columns; i++) printf "%s%s", field($0, names[i]), i < columns ? "," : "\n"
    next
}

{
    if (field($0, "ranks") != ranks) {
        ranks = field($0, "ranks"); section = ""
        printf "\n## %s ranks%s\n", ranks, field($0, "oversubscribed") == "true" ? " (more than cores: every wait is for a turn of a core too)" : ""
    }
    kind = field($0, "op") == "background_wait" ? "wait" : field($0, "op") ~ /^background/ ? "background" : "call"
    if (kind == "call" && section != kind)
        print "\n| operation | bytes | ours, us | MPI, us | ours, GB/s | MPI, GB/s | ours / MPI |\n|---|---|---|---|---|---|---|"
    if (kind == "background" && section != kind)
        print "\nA gather on a stream, computing, and both at once:\n\n| bytes | gather, us | compute, us | both, us | hidden | exposed, us |\n|---|---|---|---|---|---|"
    section = kind
    if (kind == "call")
        printf "| %s | %d | %.1f | %.1f | %.3f | %.3f | %.2f |\n", field($0, "op"), field($0, "bytes"), field($0, "ours_us"),
            field($0, "mpi_us"), field($0, "ours_gbs"), field($0, "mpi_gbs"), field($0, "ratio")
    else if (kind == "background")
        printf "| %d | %.0f | %.0f | %.0f | %.0f %% | %.0f |\n", field($0, "bytes"), field($0, "gather_us"),
            field($0, "compute_us"), field($0, "both_us"), 100 * field($0, "hidden"), field($0, "exposed_us")
    else
        printf "\nA stream that waits for a late rank takes %.1f %% of a core.\n", 100 * field($0, "core_share")
}
