# shellcheck shell=bash
# Starts the database servers that tests run on, and stops what it has started.
#
# Two functions per server: one finds it and has it started, the other waits until it is up. Thus they
# get ready side by side. Each exports the URL and says with `serving` what it offers, or with
# `leave_out` why it does not. No server outlives the script, and none that was already running is
# touched.

# shellcheck source=scripts/tools.sh
. "$(dirname "${BASH_SOURCE[0]}")/tools.sh"
# shellcheck source=scripts/mysql.sh
. "$(dirname "${BASH_SOURCE[0]}")/mysql.sh"

tested=("SQLite (bundled)")
left_out=()
exported=()
started=()      # pids, in the order of their start
stop_signal=()  # by pid
declare -A pid  # by name, of each server that we have had started
declare -A port # by name
declare -A data # by name, of MySQL and MariaDB: what new data for it is called in the cache
declare -A why  # by name, of each server that cannot be started: the reason

start_servers() {
    check_given_mysql
    sort_out_urls
    make_scratch
    launch_postgres
    # It takes longest.
    launch_mysql mysql
    launch_mysql mariadb
    launch_mysql mariadb118
    launch_postgres18
    offer_postgres
    offer_postgres18
    offer_postgres_programs
    offer_mysql mariadb
    offer_mysql mariadb118
    offer_mysql mysql
    offer_mysql_programs
    offer_mariadb105_programs
}

# By the name of a server: the variable with its URL, and how we call it.
declare -A url_variable=(
    [postgres]=JOBQ_TEST_POSTGRES_URL [postgres18]=JOBQ_TEST_POSTGRES18_URL
    [mariadb]=JOBQ_TEST_MARIADB_URL [mariadb118]=JOBQ_TEST_MARIADB118_URL [mysql]=JOBQ_TEST_MYSQL_URL
)
declare -A title=(
    [postgres]=PostgreSQL [postgres18]="PostgreSQL 18"
    [mariadb]="MariaDB 10.11" [mariadb118]="MariaDB 11.8" [mysql]=MySQL
)
declare -A given # by name: the URL of a server that somebody else runs

sort_out_urls() {
    local name variable
    for name in "${!url_variable[@]}"; do
        variable=${url_variable[$name]}
        [ -z "${!variable-}" ] || given[$name]=${!variable}
        unset "$variable"
    done
    case ${DATABASE_URL-} in
    postgres://* | postgresql://*) name=postgres ;;
    mysql://* | mariadb://*)
        # They share a protocol, and the URL does not tell.
        name=mysql
        [[ $(mysql_version_at "$DATABASE_URL") != MariaDB* ]] || name=mariadb
        ;;
    *) return ;;
    esac
    given[$name]=${given[$name]-$DATABASE_URL}
}

# ---- PostgreSQL

launch_postgres() {
    if [ -n "${given[postgres]-}" ]; then
        find_postgres || true
    else
        need_postgres
        launch postgres
    fi
}

launch_postgres18() {
    if [ -n "${given[postgres18]-}" ]; then
        :
    elif need_postgres18; then
        launch postgres18
    else
        why[postgres18]=$missing
    fi
}

offer_postgres() {
    if [ -n "${given[postgres]-}" ]; then
        offer_given postgres
    else
        await postgres || die "PostgreSQL from $postgres_bin does not start"
        offer postgres "PostgreSQL $(postgres_version "$postgres_bin")" "$(postgres_url postgres)"
    fi
}

offer_postgres18() {
    if [ -n "${given[postgres18]-}" ]; then
        offer_given postgres18
    elif await postgres18; then
        offer postgres18 "PostgreSQL $(postgres_version "$postgres18_bin")" "$(postgres_url postgres18)"
    fi
}

postgres_url() { echo "postgres://postgres@127.0.0.1:${port[$1]}/postgres"; }

# For tests that start, kill and restart a server of their own.
offer_postgres_programs() {
    local bin=${postgres_bin:-$postgres18_bin}
    if is_postgres "$bin"; then
        export_value JOBQ_TEST_PG_BIN "$bin"
    else
        unset JOBQ_TEST_PG_BIN
        leave_out "PostgreSQL restart" "no PostgreSQL programs here"
    fi
    export_value JOBQ_TEST_PG_USER "$(server_user)"
}

run_postgres() {
    local name=$1 bin=$postgres_bin
    [ "$name" = postgres ] || bin=$postgres18_bin
    # SIGINT makes it end its connections and stop.
    start_server "$name" INT env LC_ALL=C sh -c "$postgres_script" "$name" "$bin" "$scratch/$name" "${port[$name]}"
}

# The data is thrown away, so nothing waits for a disk.
# shellcheck disable=SC2016 # expanded by the inner shell
postgres_script='
    set -e
    bin=$1 dir=$2 port=$3
    if [ ! -e "$dir/data" ]; then
        setpriv --pdeathsig KILL "$bin/initdb" -D "$dir/data" -U postgres -A trust --no-sync --encoding=UTF8 --locale=C
        cat >>"$dir/data/postgresql.conf" <<CONF
listen_addresses = '\''127.0.0.1'\''
unix_socket_directories = '\''$dir'\''
max_connections = 300
shared_buffers = 128MB
logging_collector = off
fsync = off
synchronous_commit = off
full_page_writes = off
track_counts = on
autovacuum = on
CONF
    fi
    exec setpriv --pdeathsig INT "$bin/postgres" -D "$dir/data" -p "$port"
'

# The line by which `pg_ctl --wait` knows, too.
postgres_is_ready() { sed -n 8p "$scratch/$1/data/postmaster.pid" 2>/dev/null | grep -q ready; }

# ---- MySQL and MariaDB

launch_mysql() {
    local name=$1
    if [ -n "${given[$name]-}" ]; then
        # Others may still want programs like it.
        find_mysql "$name" || return 0
    elif ! need_mysql "$name"; then
        why[$name]="$missing (install one, or set ${url_variable[$name]})"
        return
    fi
    make_server_dir "$name"
    write_mysql_programs "$name" "$scratch/$name/bin"
    # What the server's data is when new is kept: making it takes MySQL longer than all else here.
    data[$name]=$(data_name "$scratch/$name/bin")
    if need_cache && [ -d "$cache/${data[$name]}" ]; then ln -s "$cache/${data[$name]}" "$scratch/$name/new"; fi
    [ -n "${given[$name]-}" ] || launch "$name"
}

offer_mysql() {
    local name=$1 url version
    if [ -n "${given[$name]-}" ]; then
        offer_given "$name"
    elif await "$name"; then
        url=mysql://jobq:jobq@127.0.0.1:${port[$name]}/jobq
        version=$(mysql_version_at "$url") || version=${title[$name]}
        keep_data "$name"
        offer "$name" "$version" "$url"
    fi
}

keep_data() {
    local new=$scratch/$1/new
    [ ! -L "$new" ] && need_cache && new_download || return 0
    if cp -R --sparse=always "$new" "$fetching/new" 2>/dev/null && chmod -R a+rX "$fetching/new"; then
        keep_download "$fetching/new" "${data[$1]}"
    else
        drop_download
    fi
}

# For tests that start, kill and restart a server of their own.
offer_mysql_programs() {
    offer_programs_of MariaDB JOBQ_TEST_MARIADB_BIN mariadb mariadb118
    offer_programs_of MySQL JOBQ_TEST_MYSQL_BIN mysql
    export_value JOBQ_TEST_MYSQL_USER "$(server_user)"
}

# Exports as variable $2 the programs of the first of the servers $3... that has some.
offer_programs_of() {
    local product=$1 variable=$2 name
    for name in "${@:3}"; do
        [ -z "${why[$name]-}" ] && [ -e "$scratch/$name/bin" ] || continue
        export_value "$variable" "$scratch/$name/bin"
        return
    done
    unset "$variable"
    leave_out "$product restart" "no $product programs here"
}

# For the test that it is refused.
offer_mariadb105_programs() {
    if need_mysql mariadb105; then
        make_server_dir mariadb105
        write_mysql_programs mariadb105 "$scratch/mariadb105/bin"
        export_value JOBQ_TEST_MARIADB105_BIN "$scratch/mariadb105/bin"
    else
        unset JOBQ_TEST_MARIADB105_BIN
        leave_out "MariaDB 10.5" "$missing"
    fi
}

run_mysql() {
    # It is a single process with nothing to save.
    start_server "$1" KILL sh -c "$mysql_script" "$1" "$scratch/$1" "${port[$1]}"
}

# Apart from durability, and the number of connections that many tests at once need, the settings are
# those that a server has by default. New data that `init` is to copy is made first.
# shellcheck disable=SC2016 # expanded by the inner shell
mysql_script='
    set -e
    dir=$1 port=$2
    if [ ! -d "$dir/new" ]; then
        mkdir "$dir/making"
        setpriv --pdeathsig KILL "$dir/bin/init" "$dir/making"
        mv "$dir/making" "$dir/new"
    fi
    [ -e "$dir/data" ] || setpriv --pdeathsig KILL "$dir/bin/init" "$dir"
    exec "$dir/bin/serve" "$dir" "$port" --max-connections=300 \
        --innodb-flush-log-at-trx-commit=0 --innodb-doublewrite=OFF --sync-binlog=0
'

mysql_is_ready() { grep -q 'ready for connections' "$scratch/$1/log"; }

# ---- what every server shares

# Has server $1 started, in its own folder and on a port of its own.
launch() {
    [ -e "$scratch/$1" ] || make_server_dir "$1"
    launch_on_some_port "$1"
}

launch_on_some_port() {
    # Below the ports that the kernel hands out to clients. Whether it is free only binding it can
    # tell; that the server does, and if not, await tries the next one.
    port[$1]=$((20000 + RANDOM % 12000))
    case $1 in
    postgres*) run_postgres "$1" ;;
    *) run_mysql "$1" ;;
    esac
}

# Waits until server $1, which was launched, is up. Fails if that cannot be, having said so.
await() {
    local name=$1 ready=mysql_is_ready tries=20
    [[ $name != postgres* ]] || ready=postgres_is_ready
    if [ -z "${pid[$name]-}" ]; then
        leave_out "${title[$name]}" "${why[$name]}"
        return 1
    fi
    until is_up "$name" "$ready"; do
        tries=$((tries - 1))
        if [ "$tries" = 0 ] || ! grep -q 'Address already in use' "$scratch/$name/log"; then
            cat "$scratch/$name/log" >&2
            why[$name]="it does not start"
            leave_out "${title[$name]}" "${why[$name]}"
            return 1
        fi
        say "port ${port[$name]} is taken; trying another"
        launch_on_some_port "$name"
    done
}

# Waits until function $2 says that server $1 is up. Fails when it has ended instead, or is not up in
# two minutes: it may have its data to make, on a machine with other things to do.
is_up() {
    local deadline=$((SECONDS + 120))
    until "$2" "$1"; do
        is_running "${pid[$1]}" && [ "$SECONDS" -lt "$deadline" ] || return
        sleep 0.1
    done
}

make_server_dir() {
    mkdir -m 700 "$scratch/$1"
    if is_root; then chown "$(server_user):" "$scratch/$1"; fi
}

# Starts server $1, which logs into its folder and stops when it gets signal $2. It has a session of
# its own, because Ctrl-C in the terminal must not stop it before the tests that use it. When we end,
# even by SIGKILL, it is killed, unless it asks for another signal.
start_server() {
    local name=$1 signal=$2
    shift 2
    set_server_prefix
    # We may have been killed before the kernel was told what to do then. And bash starts background
    # commands deaf to SIGINT.
    # shellcheck disable=SC2016 # expanded by the inner shell
    "${server_prefix[@]}" setpriv --pdeathsig KILL setsid env -C "$scratch/$name" --default-signal=INT \
        sh -c '[ "$PPID" = "$0" ] && exec "$@"' $$ "$@" </dev/null >"$scratch/$name/log" 2>&1 &
    pid[$name]=$!
    started+=($!)
    stop_signal[$!]=$signal
}

# Only processes that we have started are signalled, and only while they are jobs of ours: a pid
# that is cannot have become somebody else's. The group has, besides the server, what makes its data.
# bash would report each that is killed.
stop_servers() {
    local leader signal
    for leader in "${started[@]}"; do
        for signal in "${stop_signal[$leader]:-TERM}" QUIT KILL; do
            is_running "$leader" || break
            # The group does not exist yet if we came before setsid.
            kill "-$signal" -- "-$leader" || kill "-$signal" "$leader"
            wait_for_end "$leader"
        done
        kill -KILL -- "-$leader" || true
    done
} 2>/dev/null

is_running() { jobs -pr | grep -qx "$1"; }

wait_for_end() { timeout 20 tail -s 0.05 --pid="$1" -f /dev/null || true; }

# Sets `scratch`, where there is room for what all servers write, if anywhere. A unix socket's path is
# limited to 107 bytes, so a long TMPDIR is no good.
make_scratch() {
    local room dir
    for room in 2000 0; do
        for dir in "${TMPDIR:-/tmp}" /tmp /var/tmp; do
            if [ "${#dir}" -le 60 ] && server_reaches "$dir" && has_room "$dir" "$room" &&
                scratch=$(mktemp -d "$dir/jobq-test.XXXXXX" 2>/dev/null); then
                chmod 755 "$scratch"
                return
            fi
        done
    done
    die "no folder for the servers' data: neither ${TMPDIR:-/tmp} nor /tmp can be used"
}

# Whether $2 MiB can be written to folder $1.
has_room() { [ "$(df --output=avail -B1M -- "$1" | tail -n 1)" -ge "$2" ]; }

export_value() {
    export "$1=$2"
    exported+=("$1")
}

print_exports() {
    local name
    for name in "${exported[@]}"; do printf 'export %s=%q\n' "$name" "${!name}"; done
}

serving() {
    tested+=("$1")
    say "$1 at $2"
}

# Offers server $1 under name $2 and URL $3 to the tests.
offer() {
    export_value "${url_variable[$1]}" "$3"
    serving "$2" "$(hide_password "$3")"
}

# A server that somebody else runs.
offer_given() {
    local name=$1 url=${given[$1]} version
    version=$(version_at "$url") || version=${title[$name]}
    export_value "${url_variable[$name]}" "$url"
    serving "$version (was already running)" "$(hide_password "$url")"
}

# Prints the name and version of the server at URL $1, or says why not and fails.
version_at() {
    local answer
    case $1 in
    postgres*)
        # Only psql, if there is one, can ask.
        if answer=$(PGCONNECT_TIMEOUT=5 psql -XAtwq -c 'show server_version' "$1" 2>&1 </dev/null); then
            echo "PostgreSQL ${answer%% *}"
            return
        fi
        ;;
    *)
        mysql_version_at "$1" && return
        answer="nothing there answers as MySQL does"
        ;;
    esac
    say "the version of the server at $(hide_password "$1") is not known: ${answer##*: }"
    return 1
}

hide_password() { sed -E 's#^([a-z]+://[^:/@]*):[^@]*@#\1:***@#' <<<"$1"; }

leave_out() {
    left_out+=("$1: $2")
    say "$1 tests are left out: $2"
}

say_what_was_tested() {
    local tested_list left_out_list
    printf -v tested_list '%s, ' "${tested[@]}"
    printf -v left_out_list '%s; ' "${left_out[@]}"
    [ ${#left_out[@]} -gt 0 ] || left_out_list=nothing
    say "tested on ${tested_list%, }; left out: ${left_out_list%; }"
}
