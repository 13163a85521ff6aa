# Completion of rlhf-hpc for fish: rlhf-hpc completion fish > ~/.config/fish/completions/rlhf-hpc.fish
function __rlhf_hpc_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l found ($words[1] completion words -- $words[2..-1] "$current" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c rlhf-hpc -f -a '(__rlhf_hpc_complete)'
