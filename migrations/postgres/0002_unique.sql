-- Who holds which key: jobs that are twins have the same, and one job at most has it. Whether that
-- job still keeps others out follows from the job (or from expires_at); a row that keeps nobody out
-- any more is taken over by the next job with its key, or pruned.
create table jobq.uniques (
    unique_key bytea primary key,
    job_id bigint not null,
    scope text not null,
    -- for the scopes that do not depend on the job
    expires_at timestamptz not null default 'infinity',
    -- tells apart that one job has taken the key more than once
    taken bigint not null default 0
) with (fillfactor = 70);

-- What a job was made unique by, for a later redrive.
alter table jobq.jobs add column unique_key bytea, add column unique_scope text;
alter table jobq.finished add column unique_key bytea, add column unique_scope text;
-- duplicate_of: the job that had the key when this one was to be redriven
alter table jobq.dead
    add column unique_key bytea,
    add column unique_scope text,
    add column duplicate_of bigint;

insert into jobq.migrations (version, name) values (2, 'unique');
