# shellcheck shell=bash
# Finds the programs of MySQL and MariaDB servers, and fetches those that are missing.
#
# A server that Debian 12 does not have comes from a newer Debian, with all libraries and the libc
# that it was built for. Nothing of that is installed: it is unpacked into the cache folder and runs
# through its own loader.

# shellcheck source=scripts/tools.sh
. "$(dirname "${BASH_SOURCE[0]}")/tools.sh"

# By the name of the server: the versions that will do, and where another comes from. MySQL 8 is in
# no Debian; sid has what is the newest long-term release. MariaDB 10.5 is there to be refused.
declare -A product=([mariadb]=MariaDB [mariadb105]=MariaDB [mariadb118]=MariaDB [mysql]=MySQL)
declare -A oldest=([mariadb]=10.6 [mariadb105]=10.5 [mariadb118]=11.8 [mysql]=8.0.1)
declare -A too_new=([mariadb]=11.8 [mariadb105]=10.6 [mariadb118]=999 [mysql]=999)
declare -A suite=([mariadb]=bookworm [mariadb105]=bullseye [mariadb118]=trixie [mysql]=sid)
declare -A program=([mariadb]=mariadbd [mariadb105]=mariadbd [mariadb118]=mariadbd [mysql]=mysqld)
declare -A package=(
    [mariadb]=mariadb-server-core [mariadb105]=mariadb-server-core-10.5
    [mariadb118]=mariadb-server-core [mysql]=mysql-server-core
)

# What was found last: the words that run the server program, and the folder of its `share`.
server_words=()
server_version= # all that it says of itself
server_base=
server_root= # of unpacked packages; empty for a server that is installed

# Finds a program for server $1, installed or in the cache, or fails.
find_mysql() {
    local name=$1 candidate
    for candidate in "$(given_mysql "$name")" "$(PATH=$PATH:/usr/sbin:/usr/local/sbin command -v "${program[$name]}")"; do
        is_mysql "$name" "$candidate" "" && return
    done
    need_cache && is_mysql "$name" "$cache/$(unpacked_name "$name")/usr/sbin/${program[$name]}" "$cache/$(unpacked_name "$name")"
}

# Finds a program for server $1, fetching it if there is none, or fails and sets `missing`.
need_mysql() {
    local name=$1
    missing=
    find_mysql "$name" && return
    # Only packages of the system's own release can be installed.
    if is_root && is_debian "${suite[$name]}"; then
        apt_install "${package[$name]}" && find_mysql "$name" && return
    fi
    if unpack_debian "$(unpacked_name "$name")" "${suite[$name]}" "${package[$name]}"; then
        find_mysql "$name" && return
        missing="the programs of ${package[$name]} from Debian ${suite[$name]} do not run here"
    fi
    return 1
}

unpacked_name() { echo "${package[$1]}-${suite[$1]}-deb"; }

# The program in the folder that the user has named for server $1, if any.
given_mysql() {
    local variable=JOBQ_${product[$1]^^}_BIN
    [ -z "${!variable-}" ] || echo "${!variable}/${program[$1]}"
}

check_given_mysql() {
    local given
    given=$(given_mysql mariadb)
    # One folder is for both MariaDBs, and one of them is enough.
    [ -z "$given" ] || is_mysql mariadb "$given" "" || is_mysql mariadb118 "$given" "" ||
        die "JOBQ_MARIADB_BIN: $given is no MariaDB ${oldest[mariadb]} or newer that user $(server_name) can run"
    given=$(given_mysql mysql)
    [ -z "$given" ] || is_mysql mysql "$given" "" ||
        die "JOBQ_MYSQL_BIN: $given is no MySQL ${oldest[mysql]} or newer that user $(server_name) can run"
}

# Whether program $2 is one for server $1; $3 is the folder it was unpacked into, or empty.
is_mysql() {
    local name=$1 path=$2 root=$3 version
    [ -n "$path" ] && as_server test -x "$path" || return
    set_server_words "$path" "$root" || return
    version=$(as_server "${server_words[@]}" --no-defaults --version 2>/dev/null) || return
    server_version=$version
    # Debian's MariaDB goes by the name of mysqld, too.
    if [[ $version == *MariaDB* ]]; then [ "${product[$name]}" = MariaDB ]; else [ "${product[$name]}" = MySQL ]; fi || return
    version=$(sed -nE 's/.* Ver ([0-9.]+).*/\1/p' <<<"$version")
    [ -n "$version" ] && at_least "${oldest[$name]}" "$version" && ! at_least "${too_new[$name]}" "$version"
}

at_least() { printf '%s\n' "$1" "$2" | sort -CV; }

set_server_words() {
    local path=$1 loader libraries
    server_root=$2
    if [ -z "$server_root" ]; then
        path=$(readlink -f -- "$path")
        server_base=${path%/*/*}
        server_words=("$path")
        return
    fi
    server_base=$server_root/usr
    # Before Debian 12 its usual name is a link to one with the libc's version.
    loader=$(find "$server_root/lib" "$server_root/usr/lib" -name 'ld-*.so*' -type f -print -quit 2>/dev/null)
    libraries=$(printf '%s:' "$server_root"/{usr/,}lib/*-linux-gnu*)
    [ -n "$loader" ] && server_words=("$loader" --library-path "${libraries%:}" "$path")
}

# Makes folder $2 one of programs that run the server $1 that was found last, all in the same way:
# `init` and `serve`, and `server` for those two.
write_mysql_programs() {
    local name=$1 bin=$2 share options=(--no-defaults --basedir="$server_base")
    for share in "$server_base"/share/{mariadb,mysql} "$server_base/share"; do
        [ ! -e "$share/charsets/Index.xml" ] || break
    done
    options+=(--lc-messages-dir="$share" --character-sets-dir="$share/charsets")
    [ -z "$server_root" ] || options+=(--plugin-dir="$server_root/usr/lib/mysql/plugin")
    # The default folder is the package's, and the second protocol wants a port of its own.
    [ "${product[$name]}" != MySQL ] || options+=(--secure-file-priv=NULL --mysqlx=OFF)
    mkdir "$bin"
    cp "$(dirname "${BASH_SOURCE[0]}")"/mysql/{init,serve} "$bin"
    {
        echo '#!/bin/sh'
        printf 'exec'
        printf ' %q' "${server_words[@]}" "${options[@]}"
        echo ' "$@"'
    } >"$bin/server"
    # One statement a line: MariaDB's bootstrap takes nothing else.
    cat >"$bin/accounts.sql" <<'SQL'
CREATE DATABASE jobq;
CREATE USER jobq@'%' IDENTIFIED BY 'jobq';
GRANT ALL ON *.* TO jobq@'%' WITH GRANT OPTION;
SQL
    if [ "${product[$name]}" = MariaDB ]; then
        {
            printf '%s\n' 'CREATE DATABASE IF NOT EXISTS mysql;' 'USE mysql;' 'SET @auth_root_socket = NULL;'
            # Their names begin with mysql or mariadb. The last is new in 10.6.
            cat "$share"/m*_{system_tables,performance_tables,system_tables_data}.sql
            cat "$share"/m*_sys_schema.sql 2>/dev/null || true
            # Accounts can be created from here on.
            echo 'FLUSH PRIVILEGES;'
        } >"$bin/tables.sql"
    fi
    chmod -R a+rX "$bin"
    chmod a+x "$bin/server"
}

# Prints a name for the data that the programs in folder $1, of the server that was found last, make.
data_name() { echo "data-$( (echo "$server_version" && cat "$1"/{init,server,*.sql}) | cksum | tr ' ' -)"; }

# Asks server $1 (a URL) who it is, and prints `MySQL 9.7.4` or `MariaDB 10.11.19`, or fails. A
# server greets whoever connects with what its version() says, so no client is needed.
mysql_version_at() {
    local host port greeting
    host=$(sed -E 's#^[a-z]+://([^/]*@)?(\[[^]]*\]|[^:/?]*).*#\2#' <<<"$1")
    port=$(sed -nE 's#^[a-z]+://([^/]*@)?(\[[^]]*\]|[^:/?]*):([0-9]+).*#\3#p' <<<"$1")
    host=${host#[}
    # NUL bytes divide the greeting; the piece with the version begins with the protocol's, 10.
    # shellcheck disable=SC2016 # expanded by the inner bash
    greeting=$(timeout 5 bash -c '
        exec 3<>"/dev/tcp/$0/$1"
        while IFS= read -r -d "" -u 3 piece; do
            if [[ $piece == $'\''\n'\''?* ]]; then printf "%s\n" "${piece:1}"; break; fi
        done' "${host%]}" "${port:-3306}" 2>/dev/null) && [ -n "$greeting" ] || return
    # MariaDB puts a version in front that old replicas believe.
    greeting=${greeting#5.5.5-}
    if [[ $greeting == *MariaDB* ]]; then printf 'MariaDB '; else printf 'MySQL '; fi
    printf '%s\n' "${greeting%%-*}"
}
