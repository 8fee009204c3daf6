-- Which steps were applied. Times are microseconds since 1970 (UTC);
-- now_us() stands for the database's clock. Each statement can be run again: MySQL commits after
-- every one of them, so a step that broke off is begun anew.
create table if not exists jobq_migrations (
    version bigint not null primary key,
    name varchar(100) not null,
    applied_at bigint not null default (now_us())
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

-- Unfinished jobs only; one row is one job.
create table if not exists jobq_jobs (
    id bigint not null auto_increment primary key,
    -- 9223372036854775807 = waiting, for wait_reason
    run_after bigint not null default (now_us()),
    token bigint not null default 0,
    -- the session that runs it; 0 = nobody
    leased_by bigint not null default 0,
    created_at bigint not null default (now_us()),
    attempt integer not null default 0,
    max_attempts integer not null default 20,
    interruptions integer not null default 0,
    crashes smallint not null default 0,
    max_crashes smallint not null default 3,
    priority smallint not null default 0,
    -- the priority, or 32767 = next in line
    band smallint not null default 0,
    isolated tinyint not null default 0,
    cancel_requested tinyint not null default 0,
    queue varchar(100) not null default 'default',
    kind varchar(100) not null,
    wait_reason varchar(100),
    tags longtext,
    metadata longtext,
    payload longtext not null default ('{}'),
    key jobq_jobs_due (queue, band, run_after, id),
    constraint jobq_jobs_priority_check check (priority between -4 and 4),
    constraint jobq_band_is_the_priority check (band in (priority, 32767)),
    -- to comparisons it would be no other name
    constraint jobq_no_space_at_the_end check (queue not like '% ' and kind not like '% ')
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

-- Who may hold jobs, and until when: one row per process and lease length. lease is in microseconds.
create table if not exists jobq_sessions (
    id bigint not null primary key,
    worker text not null,
    lease bigint not null,
    leased_until bigint not null,
    started_at bigint not null default (now_us()),
    kinds longtext not null,
    queues longtext not null,
    floors longtext not null default ('[]')
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

-- Sessions whose lease expired and whose jobs are being rescued.
create table if not exists jobq_closed_sessions (
    id bigint not null primary key,
    worker text not null,
    leased_until bigint not null,
    closed_at bigint not null default (now_us())
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

-- Every attempt that did not complete its job; only inserted into, and pruned with its job.
create table if not exists jobq_attempts (
    job_id bigint not null,
    token bigint not null,
    attempt integer not null,
    reason varchar(100) not null,
    error longtext not null,
    worker text,
    at bigint not null default (now_us()),
    primary key (job_id, token)
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

-- Completed and cancelled jobs, until expires_at.
create table if not exists jobq_finished (
    id bigint not null primary key,
    token bigint not null,
    state varchar(100) not null,
    created_at bigint not null,
    finished_at bigint not null default (now_us()),
    expires_at bigint not null,
    attempt integer not null,
    max_attempts integer not null,
    interruptions integer not null,
    crashes smallint not null,
    max_crashes smallint not null,
    priority smallint not null,
    queue varchar(100) not null,
    kind varchar(100) not null,
    reason longtext,
    result longtext,
    tags longtext,
    metadata longtext,
    payload longtext not null,
    key jobq_finished_expires (expires_at),
    constraint jobq_finished_state_check check (state in ('completed', 'cancelled'))
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

-- Dead letters, until they are redriven or deleted.
create table if not exists jobq_dead (
    id bigint not null primary key,
    token bigint not null,
    reason varchar(100) not null,
    created_at bigint not null,
    died_at bigint not null default (now_us()),
    attempt integer not null,
    max_attempts integer not null,
    interruptions integer not null,
    crashes smallint not null,
    max_crashes smallint not null,
    priority smallint not null,
    queue varchar(100) not null,
    kind varchar(100) not null,
    error longtext not null,
    tags longtext,
    metadata longtext,
    payload longtext not null
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

-- Work that one process at a time does for all, such as the sweep.
create table if not exists jobq_duties (
    name varchar(100) not null primary key,
    held_by bigint not null default 0,
    held_until bigint not null default 0,
    notes longtext not null default ('')
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

-- Unfinished jobs as people see them.
create or replace sql security invoker view jobq_job_states as
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
