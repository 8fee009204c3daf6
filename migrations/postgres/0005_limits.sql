-- What queues may do across the fleet. Every claim reads it; one of a queue that is here locks the row.
create table jobq.queue_limits (
    queue text primary key,
    -- how many of its jobs run at once
    max_running integer check (max_running between 1 and 10000),
    -- so many start in rate_per, and burst at once after a time without any
    rate_jobs integer,
    rate_per interval,
    burst integer,
    -- when burst may start at once again
    full_at timestamptz not null default '-infinity',
    check (max_running is not null or rate_jobs is not null),
    check (num_nulls(rate_jobs, rate_per, burst) in (0, 3)),
    check (rate_jobs > 0 and rate_per > interval '0' and burst > 0)
) with (
    fillfactor = 10,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

-- The places for running jobs. A place is taken while its job runs under this very token; nothing frees it.
create table jobq.queue_slots (
    queue text not null,
    slot integer not null,
    -- that had it last
    job_id bigint not null default 0,
    token bigint not null default 0,
    primary key (queue, slot)
) with (
    fillfactor = 20,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);

insert into jobq.migrations (version, name) values (5, 'limits');
