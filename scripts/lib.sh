# Shared by the scripts beside it; to be sourced from the repository's root.

# make_environment DIR REQUIREMENT...: make a virtual environment that has the requirements, and
# print the path of its interpreter. Does nothing where the same was done before, by the same
# interpreter and in the same place. $PYTHON names the interpreter; python3 is the default.
make_environment() {
    local dir=$1 base=${PYTHON:-python3} version stamp requirement
    shift
    version=$("$base" -c 'import sys; print(sys.version); sys.exit(sys.version_info < (3, 10))') || {
        echo "$base is not Python 3.10 or newer; set PYTHON to one that is" >&2
        return 1
    }
    stamp=$(cat pyproject.toml scripts/lib.sh <(printf '%s\n' "$PWD" "$version" "$@") | cksum)
    if [ ! -x "$dir/bin/python" ] || [ "$(cat "$dir/.stamp" 2>/dev/null)" != "$stamp" ]; then
        echo "Preparing $dir with $base ..." >&2
        "$base" -m venv --clear "$dir" >&2 || {
            echo "$base cannot make virtual environments; on Debian, install python3-venv" >&2
            return 1
        }
        for requirement in "$@"; do
            install_into "$dir" "$requirement" >&2 || {
                echo "Installing $requirement failed; run the script again to start over" >&2
                return 1
            }
        done
        echo "$stamp" >"$dir/.stamp" || return 1
    fi
    echo "$dir/bin/python"
}

# install_into DIR REQUIREMENT: a requirement that begins with a dot is this repository.
install_into() {
    local pip=("$1/bin/python" -m pip install -q --disable-pip-version-check)
    case $2 in
        --no-deps\ *) "${pip[@]}" --no-deps "${2#--no-deps }" ;;
        .*) "${pip[@]}" -e "$2" ;;
        *) "${pip[@]}" "$2" ;;
    esac
}

# find_python VERSION: print an interpreter of that version which really runs, if there is one.
find_python() {
    local candidate
    for candidate in "python$1" ~/.pyenv/versions/"$1".*/bin/python; do
        if "$candidate" -c '' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}
