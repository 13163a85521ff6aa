# Completion of rlhf-hpc for bash: source <(rlhf-hpc completion bash)
_rlhf_hpc() {
    local line=${COMP_LINE:0:COMP_POINT} words word done_already
    read -ra words <<<"$line"
    [[ $line != *[[:space:]] ]] || words+=("")
    # Assignments before the command are not its words.
    while [[ ${#words[@]} -gt 1 && ${words[0]} != "${COMP_WORDS[0]}" ]]; do words=("${words[@]:1}"); done
    # Of a word like ppo.loss=cl, readline replaces only the part after the last = or colon.
    done_already=${words[-1]%"${words[-1]##*[=:]}"}
    COMPREPLY=()
    while IFS=$'\t' read -r word _; do
        COMPREPLY+=("${word#"$done_already"}")
        # Another word does not follow yet.
        [[ $word != *[=.] ]] || compopt -o nospace
    done < <("${words[0]}" completion words -- "${words[@]:1}" 2>/dev/null)
}
complete -o default -F _rlhf_hpc rlhf-hpc
