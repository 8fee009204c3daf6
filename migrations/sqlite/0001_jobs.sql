-- Which steps were applied. Times are microseconds since 1970 (UTC);
-- now_us() stands for the database's clock.
create table jobq_migrations (
    version integer primary key,
    name text not null,
    applied_at integer not null default (now_us())
);

-- Unfinished jobs only; one row is one job. Ids must never be used twice: autoincrement. Strict, for
-- a job whose run_after is text such as '2030-01-01 00:00:00' would never be claimed.
create table jobq_jobs (
    id integer primary key autoincrement,
    -- 9223372036854775807 = waiting, for wait_reason
    run_after integer not null default (now_us()),
    token integer not null default 0,
    -- the session that runs it; 0 = nobody
    leased_by integer not null default 0,
    created_at integer not null default (now_us()),
    attempt integer not null default 0,
    max_attempts integer not null default 20,
    interruptions integer not null default 0,
    crashes integer not null default 0,
    max_crashes integer not null default 3,
    priority integer not null default 0 check (priority between -4 and 4),
    -- the priority, or 32767 = next in line
    band integer not null default 0,
    isolated integer not null default 0,
    cancel_requested integer not null default 0,
    queue text not null default 'default',
    kind text not null,
    wait_reason text,
    tags text,
    metadata text,
    payload text not null default '{}',
    constraint band_is_the_priority check (band in (priority, 32767))
) strict;

create index jobq_jobs_due on jobq_jobs (queue, band desc, run_after, id);

-- Who may hold jobs, and until when: one row per process and lease length. lease is in microseconds.
create table jobq_sessions (
    id integer primary key,
    worker text not null,
    lease integer not null,
    leased_until integer not null,
    started_at integer not null default (now_us()),
    kinds text not null,
    queues text not null,
    floors text not null default '[]'
);

-- Sessions whose lease expired and whose jobs are being rescued.
create table jobq_closed_sessions (
    id integer primary key,
    worker text not null,
    leased_until integer not null,
    closed_at integer not null default (now_us())
);

-- Every attempt that did not complete its job; only inserted into, and pruned with its job.
create table jobq_attempts (
    job_id integer not null,
    token integer not null,
    attempt integer not null,
    reason text not null,
    error text not null,
    worker text,
    at integer not null default (now_us()),
    primary key (job_id, token)
) without rowid;

-- Completed and cancelled jobs, until expires_at.
create table jobq_finished (
    id integer primary key,
    token integer not null,
    state text not null check (state in ('completed', 'cancelled')),
    created_at integer not null,
    finished_at integer not null default (now_us()),
    expires_at integer not null,
    attempt integer not null,
    max_attempts integer not null,
    interruptions integer not null,
    crashes integer not null,
    max_crashes integer not null,
    priority integer not null,
    queue text not null,
    kind text not null,
    reason text,
    result text,
    tags text,
    metadata text,
    payload text not null
);

create index jobq_finished_expires on jobq_finished (expires_at);

-- Dead letters, until they are redriven or deleted.
create table jobq_dead (
    id integer primary key,
    token integer not null,
    reason text not null,
    created_at integer not null,
    died_at integer not null default (now_us()),
    attempt integer not null,
    max_attempts integer not null,
    interruptions integer not null,
    crashes integer not null,
    max_crashes integer not null,
    priority integer not null,
    queue text not null,
    kind text not null,
    error text not null,
    tags text,
    metadata text,
    payload text not null
);

-- Work that one process at a time does for all, such as the sweep.
create table jobq_duties (
    name text primary key,
    held_by integer not null default 0,
    held_until integer not null default 0,
    notes text not null default ''
);

-- Unfinished jobs as people see them.
create view jobq_job_states as
select
    job.id,
    case
        when job.leased_by <> 0 then 'running'
        when job.run_after = 9223372036854775807 then 'waiting'
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
from jobq_jobs as job
left join (
    select id, worker, leased_until from jobq_sessions
    union all
    select id, worker, leased_until from jobq_closed_sessions
) as session on session.id = job.leased_by and job.leased_by <> 0;

insert into jobq_migrations (version, name) values (1, 'jobs');
