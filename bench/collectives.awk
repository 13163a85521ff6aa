# The lines of `bench collectives --json` to tables, or with csv=1 to one row a line.

function field(json, key,    at, rest) {
    at = index(json, "\"" key "\":")
    if (!at) return ""
    rest = substr(json, at + length(key) + 3)
    if (substr(rest, 1, 1) == "\"") { rest = substr(rest, 2); sub(/".*/, "", rest) } else sub(/[,}].*/, "", rest)
    return rest == "null" ? "" : rest
}

BEGIN {
    columns = split("op ranks bytes oversubscribed repeats calls us gbs", names, " ")
    if (csv) for (i = 1; i <= columns; i++) printf "%s%s", names[i], i < columns ? "," : "\n"
}

csv {
    for (i = 1; i <= columns; i++) printf "%s%s", field($0, names[i]), i < columns ? "," : "\n"
    next
}

{
    if (field($0, "ranks") != ranks) {
        ranks = field($0, "ranks")
        printf "\n## %s ranks%s\n", ranks, field($0, "oversubscribed") == "true" ? " (more than cores: each wait includes waiting for a core)" : ""
        print "\n| operation | bytes | us | GB/s |\n|---|---|---|---|"
    }
    printf "| %s | %d | %.1f | %.3f |\n", field($0, "op"), field($0, "bytes"), field($0, "us"), field($0, "gbs")
}
