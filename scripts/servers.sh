# shellcheck shell=bash
# Starts the database servers that tests run on, and stops what it has started.
#
# One function per server. Each exports the URL and says with `serving` what it offers, or with
# `leave_out` why it does not. No server outlives the script, and none that was already running is
# touched.

# shellcheck source=scripts/tools.sh
. "$(dirname "${BASH_SOURCE[0]}")/tools.sh"

tested=("SQLite (bundled)")
left_out=()
exported=()
started=() # pids, in the order of their start
stop_signal=() # by pid

start_servers() {
    make_scratch
    start_postgres
    start_postgres18
    offer_postgres_programs
}

# ---- PostgreSQL

start_postgres() {
    local url=${JOBQ_TEST_POSTGRES_URL-}
    case ${DATABASE_URL-} in
    postgres://* | postgresql://*) url=${url:-$DATABASE_URL} ;;
    esac
    if [ -n "$url" ]; then
        find_postgres || true
        export_value JOBQ_TEST_POSTGRES_URL "$url"
        serving_elsewhere PostgreSQL "$url"
        return
    fi
    need_postgres
    start_postgres_in postgres "$postgres_bin" || die "PostgreSQL from $postgres_bin does not start"
    export_value JOBQ_TEST_POSTGRES_URL "$url"
    serving "PostgreSQL $(postgres_version "$postgres_bin")" "$url"
}

start_postgres18() {
    local url=${JOBQ_TEST_POSTGRES18_URL-}
    if [ -n "$url" ]; then
        export_value JOBQ_TEST_POSTGRES18_URL "$url"
        serving_elsewhere PostgreSQL "$url"
    elif ! need_postgres18; then
        leave_out "PostgreSQL 18" "$missing"
    elif ! start_postgres_in postgres18 "$postgres18_bin"; then
        leave_out "PostgreSQL 18" "it does not start"
    else
        export_value JOBQ_TEST_POSTGRES18_URL "$url"
        serving "PostgreSQL $(postgres_version "$postgres18_bin")" "$url"
    fi
}

# For tests that start, kill and restart a server of their own.
offer_postgres_programs() {
    local bin=${postgres_bin:-$postgres18_bin}
    if is_postgres "$bin"; then
        export_value JOBQ_TEST_PG_BIN "$bin"
    else
        unset JOBQ_TEST_PG_BIN
        leave_out "servers that tests restart" "no PostgreSQL programs here"
    fi
    export_value JOBQ_TEST_PG_USER "$(server_user)"
}

# Starts the PostgreSQL of folder $2 in scratch folder $1 and sets `url`.
start_postgres_in() {
    local dir=$scratch/$1 bin=$2 port
    mkdir -m 700 "$dir"
    if is_root; then chown "$(server_user):" "$dir"; fi
    if ! as_server env -C "$dir" LC_ALL=C "$bin/initdb" -D "$dir/data" -U postgres -A trust --no-sync \
        --encoding=UTF8 --locale=C >"$dir/initdb.log" 2>&1; then
        cat "$dir/initdb.log" >&2
        return 1
    fi
    # The data is thrown away, so nothing waits for a disk.
    cat >>"$dir/data/postgresql.conf" <<CONF
listen_addresses = '127.0.0.1'
unix_socket_directories = '$dir'
max_connections = 300
shared_buffers = 128MB
logging_collector = off
fsync = off
synchronous_commit = off
full_page_writes = off
track_counts = on
autovacuum = on
CONF
    for _ in {1..20}; do
        # Below the ports that the kernel hands out to clients. Whether it is free only binding
        # it can tell; that the server does, and the next one is tried.
        port=$((20000 + RANDOM % 12000))
        # SIGINT makes it end its connections and stop.
        start_server "$dir/log" INT env -C "$dir" LC_ALL=C "$bin/postgres" -D "$dir/data" -p "$port"
        if server_is_up postgres_ready "$dir"; then
            url=postgres://postgres@127.0.0.1:$port/postgres
            return
        fi
        grep -q 'Address already in use' "$dir/log" || break
        say "port $port is taken; trying another"
    done
    cat "$dir/log" >&2
    return 1
}

# The line by which `pg_ctl --wait` knows, too.
postgres_ready() { sed -n 8p "$1/data/postmaster.pid" 2>/dev/null | grep -q ready; }

# ---- what every server shares

# Starts a server that logs to file $1 and stops when it gets signal $2. It has a session of its
# own, because Ctrl-C in the terminal must not stop it before the tests that use it; and it gets
# the signal when we end, even by SIGKILL.
start_server() {
    local log=$1 signal=$2
    shift 2
    set_server_prefix
    "${server_prefix[@]}" setpriv --pdeathsig "$signal" setsid "$@" </dev/null >"$log" 2>&1 &
    started+=($!)
    stop_signal[$!]=$signal
}

# Waits until command $@ says that the server started last is up. Fails when it has ended instead,
# or is not up in a minute.
server_is_up() {
    local deadline=$((SECONDS + 60))
    until "$@"; do
        is_running "${started[-1]}" && [ "$SECONDS" -lt "$deadline" ] || return
        sleep 0.05
    done
}

# Only processes that we have started are signalled, and only while they are jobs of ours: a pid
# that is cannot have become somebody else's.
stop_servers() {
    local pid signal
    for pid in "${started[@]}"; do
        for signal in "${stop_signal[$pid]:-TERM}" QUIT KILL; do
            is_running "$pid" || break
            kill "-$signal" "$pid"
            wait_for_end "$pid"
        done
    done
}

is_running() { jobs -pr | grep -qx "$1"; }

wait_for_end() { timeout 20 tail -s 0.05 --pid="$1" -f /dev/null || true; }

# Sets `scratch`. A unix socket's path is limited to 107 bytes, so a long TMPDIR is no good.
make_scratch() {
    local dir
    for dir in "${TMPDIR:-/tmp}" /tmp /var/tmp; do
        if [ "${#dir}" -le 60 ] && server_reaches "$dir" && scratch=$(mktemp -d "$dir/jobq-test.XXXXXX" 2>/dev/null); then
            chmod 755 "$scratch"
            return
        fi
    done
    die "no folder for the servers' data: neither ${TMPDIR:-/tmp} nor /tmp can be used"
}

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

# A server that somebody else runs. Only psql, if there is one, can ask it for its version.
serving_elsewhere() {
    local name=$1 url=$2 answer
    if answer=$(PGCONNECT_TIMEOUT=5 psql -XAtwq -c 'show server_version' "$url" 2>&1 </dev/null); then
        name="$name ${answer%% *}"
    else
        say "the version of $name at $(hide_password "$url") is not known: ${answer##*: }"
    fi
    serving "$name (was already running)" "$(hide_password "$url")"
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
