# Shared by the scripts beside it; to be sourced from the repository's root.

# make_environment DIR REQUIREMENT...: make a virtual environment that has the requirements, and
# print the path of its interpreter. Does nothing when that was done for the same pyproject.toml.
make_environment() {
    local dir=$1 stamp
    shift
    stamp=$(cat pyproject.toml scripts/lib.sh <(printf '%s\n' "$@") | cksum)
    if [ ! -x "$dir/bin/python" ] || [ "$(cat "$dir/.stamp" 2>/dev/null)" != "$stamp" ]; then
        echo "Preparing $dir ..." >&2
        "${PYTHON:-python3}" -m venv --clear "$dir"
        local requirement
        for requirement in "$@"; do
            case $requirement in
                --no-deps\ *) "$dir/bin/python" -m pip install -q --no-deps "${requirement#--no-deps }" >&2 ;;
                .*) "$dir/bin/python" -m pip install -q -e "$requirement" >&2 ;;
                *) "$dir/bin/python" -m pip install -q "$requirement" >&2 ;;
            esac
        done
        echo "$stamp" >"$dir/.stamp"
    fi
    echo "$dir/bin/python"
}
