do $$
begin
    -- `if not exists` needs the right to create schemas even where there is nothing to create.
    if to_regnamespace('jobq') is null then
        create schema jobq;
    end if;
end
$$;

-- Which steps were applied.
create table jobq.migrations (
    version bigint primary key,
    name text not null,
    applied_at timestamptz not null default clock_timestamp()
);

-- Unfinished jobs only; one row is one job. A claim changes token, attempt and leased_by, which no
-- index contains, so that it is a HOT update: half of each page is left free for the new versions.
create table jobq.jobs (
    id bigint generated always as identity primary key,
    -- 'infinity' = waiting, for wait_reason
    run_after timestamptz not null default clock_timestamp(),
    token bigint not null default 0,
    -- the session that runs it; 0 = nobody
    leased_by bigint not null default 0,
    created_at timestamptz not null default clock_timestamp(),
    attempt integer not null default 0,
    max_attempts integer not null default 20,
    interruptions integer not null default 0,
    crashes smallint not null default 0,
    max_crashes smallint not null default 3,
    priority smallint not null default 0 check (priority between -4 and 4),
    -- the priority, or 32767 = next in line
    band smallint not null default 0,
    isolated boolean not null default false,
    cancel_requested boolean not null default false,
    queue text not null default 'default',
    kind text not null,
    wait_reason text,
    tags text,
    metadata text,
    payload text not null default '{}',
    constraint band_is_the_priority check (band in (priority, 32767))
) with (
    fillfactor = 50,
    vacuum_truncate = off,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    toast.vacuum_truncate = off,
    toast.autovacuum_vacuum_scale_factor = 0,
    toast.autovacuum_vacuum_threshold = 5000,
    toast.autovacuum_vacuum_cost_delay = 0
);

create index jobs_due on jobq.jobs (queue, band desc, run_after, id);

-- Jobs that wait for somebody to know their kind.
create index jobs_parked on jobq.jobs (queue, kind, id) where wait_reason = 'kind';

-- Who may hold jobs, and until when: one row per process and lease length.
create table jobq.sessions (
    id bigint primary key,
    worker text not null,
    lease interval not null,
    leased_until timestamptz not null,
    started_at timestamptz not null default clock_timestamp(),
    kinds text[] not null,
    queues text[] not null,
    floors text not null default '[]'
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 100,
    autovacuum_vacuum_cost_delay = 0
);

-- Sessions whose lease expired and whose jobs are being rescued.
create table jobq.closed_sessions (
    id bigint primary key,
    worker text not null,
    leased_until timestamptz not null,
    closed_at timestamptz not null default clock_timestamp()
);

-- Every attempt that did not complete its job; only inserted into, and pruned with its job.
create table jobq.attempts (
    job_id bigint not null,
    token bigint not null,
    attempt integer not null,
    reason text not null,
    error text not null,
    worker text,
    at timestamptz not null default clock_timestamp(),
    primary key (job_id, token)
);

-- Completed and cancelled jobs, until expires_at.
create table jobq.finished (
    id bigint primary key,
    token bigint not null,
    state text not null check (state in ('completed', 'cancelled')),
    created_at timestamptz not null,
    finished_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    attempt integer not null,
    max_attempts integer not null,
    interruptions integer not null,
    crashes smallint not null,
    max_crashes smallint not null,
    priority smallint not null,
    queue text not null,
    kind text not null,
    reason text,
    result text,
    tags text,
    metadata text,
    payload text not null
);

create index finished_expires on jobq.finished (expires_at);

-- Dead letters, until they are redriven or deleted.
create table jobq.dead (
    id bigint primary key,
    token bigint not null,
    reason text not null,
    created_at timestamptz not null,
    died_at timestamptz not null default clock_timestamp(),
    attempt integer not null,
    max_attempts integer not null,
    interruptions integer not null,
    crashes smallint not null,
    max_crashes smallint not null,
    priority smallint not null,
    queue text not null,
    kind text not null,
    error text not null,
    tags text,
    metadata text,
    payload text not null
);

-- Work that one process at a time does for all, such as the sweep.
create table jobq.duties (
    name text primary key,
    held_by bigint not null default 0,
    held_until timestamptz not null default '-infinity',
    notes text not null default ''
) with (fillfactor = 50);

-- When the last wake-up was sent, in milliseconds. A sequence, because its value is seen by all at
-- once, whatever their transactions do.
create sequence jobq.wake_gate minvalue 0 start 0;

-- Unfinished jobs as people see them.
create view jobq.job_states as
select
    job.id,
    case
        when job.leased_by <> 0 then 'running'
        when job.run_after = 'infinity' then 'waiting'
        else 'pending'
    end as state,
    job.queue,
    job.kind,
    job.priority,
    job.run_after,
    job.attempt,
    job.max_attempts,
    job.token,
    job.wait_reason,
    session.worker,
    session.leased_until,
    job.cancel_requested,
    job.created_at
from jobq.jobs as job
left join (
    select id, worker, leased_until from jobq.sessions
    union all
    select id, worker, leased_until from jobq.closed_sessions
) as session on session.id = job.leased_by and job.leased_by <> 0;

insert into jobq.migrations (version, name) values (1, 'jobs');
