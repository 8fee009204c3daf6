-- Which job may run of those with one key: one at a time. Who is to have the grant follows from the
-- jobs; a row whose job is gone is given to the next one, or deleted.
create table jobq_key_grants (
    job_key text primary key,
    job_id integer not null
) strict, without rowid;

-- Copied, for SQLite cannot change a check.
drop view jobq_job_states;

create table jobq_jobs_3 (
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
    -- the priority, or 32767 = next in line, or the priority + 100 = before its priority, or
    -- -32768 = waits for its key
    band integer not null default 0,
    isolated integer not null default 0,
    cancel_requested integer not null default 0,
    queue text not null default 'default',
    kind text not null,
    wait_reason text,
    tags text,
    metadata text,
    payload text not null default '{}',
    unique_key blob,
    unique_scope text,
    job_key text,
    -- what becomes of those behind it while it cannot run: 'block' or 'skip'
    on_block text,
    constraint band_is_of_the_priority check (
        band in (priority, priority + 100, 32767)
        or (band = -32768 and run_after = 9223372036854775807 and coalesce(wait_reason, '') = 'key')
    )
) strict;

insert into jobq_jobs_3 (
    id, run_after, token, leased_by, created_at, attempt, max_attempts, interruptions, crashes, max_crashes,
    priority, band, isolated, cancel_requested, queue, kind, wait_reason, tags, metadata, payload,
    unique_key, unique_scope
)
select
    id, run_after, token, leased_by, created_at, attempt, max_attempts, interruptions, crashes, max_crashes,
    priority, band, isolated, cancel_requested, queue, kind, wait_reason, tags, metadata, payload,
    unique_key, unique_scope
from jobq_jobs
order by id;

-- Ids must never be used twice, not even those of jobs that are gone.
delete from sqlite_sequence where name = 'jobq_jobs_3';

insert into sqlite_sequence (name, seq)
select 'jobq_jobs_3', seq from sqlite_sequence where name = 'jobq_jobs';

drop table jobq_jobs;

-- Triggers of connections that are open go on naming the table.
pragma legacy_alter_table = on;

alter table jobq_jobs_3 rename to jobq_jobs;

pragma legacy_alter_table = off;

create index jobq_jobs_due on jobq_jobs (queue, band desc, run_after, id);

-- The jobs of a key in order.
create index jobq_jobs_keyed on jobq_jobs (job_key, id) where job_key is not null;

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

alter table jobq_finished add column job_key text;
alter table jobq_finished add column on_block text;
alter table jobq_dead add column job_key text;
alter table jobq_dead add column on_block text;

insert into jobq_migrations (version, name) values (3, 'keys');
