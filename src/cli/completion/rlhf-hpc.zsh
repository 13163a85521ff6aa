#compdef rlhf-hpc
# Completion of rlhf-hpc for zsh: source <(rlhf-hpc completion zsh), after compinit
_rlhf_hpc() {
    local -a whole open
    local word about
    while IFS=$'\t' read -r word about; do
        # Another word does not follow a table or a key yet.
        if [[ $word == *[=.] ]]; then
            open+=("${word//:/\\:}:$about")
        else
            whole+=("${word//:/\\:}:$about")
        fi
    done < <("${words[1]}" completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)
    if (( $#whole + $#open == 0 )); then
        # The value of a key is the part after the last =.
        [[ ${words[CURRENT]} != *=* ]] || compset -P '*='
        _files
        return
    fi
    (( $#open == 0 )) || _describe key open -S ''
    (( $#whole == 0 )) || _describe word whole
}
if [[ ${funcstack[1]} == _rlhf_hpc ]]; then
    _rlhf_hpc "$@"
else
    compdef _rlhf_hpc rlhf-hpc
fi
