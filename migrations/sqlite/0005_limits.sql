-- What queues may do across the fleet. Every claim reads it.
create table jobq_queue_limits (
    queue text primary key,
    -- how many of its jobs run at once
    max_running integer check (max_running between 1 and 10000),
    -- so many start in rate_per microseconds, and burst at once after a time without any
    rate_jobs integer check (rate_jobs > 0),
    rate_per integer check (rate_per > 0),
    burst integer check (burst > 0),
    -- when burst may start at once again
    full_at integer not null default -9223372036854775808,
    check (max_running is not null or rate_jobs is not null),
    check ((rate_jobs is null) = (rate_per is null) and (rate_jobs is null) = (burst is null))
) strict, without rowid;

-- The places for running jobs. A place is taken while its job runs under this very token; nothing frees it.
create table jobq_queue_slots (
    queue text not null,
    slot integer not null,
    -- that had it last
    job_id integer not null default 0,
    token integer not null default 0,
    primary key (queue, slot)
) strict, without rowid;

insert into jobq_migrations (version, name) values (5, 'limits');
