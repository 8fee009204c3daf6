-- Who holds which key: jobs that are twins have the same, and one job at most has it. Whether that
-- job still keeps others out follows from the job (or from expires_at); a row that keeps nobody out
-- any more is taken over by the next job with its key, or pruned.
create table jobq_uniques (
    unique_key blob primary key,
    -- 0 while the transaction that took it has not written its job
    job_id integer not null,
    scope text not null,
    -- for the scopes that do not depend on the job
    expires_at integer not null default 9223372036854775807,
    -- tells apart that one job has taken the key more than once
    taken integer not null default 0
) strict, without rowid;

-- What a job was made unique by, for a later redrive.
alter table jobq_jobs add column unique_key blob;
alter table jobq_jobs add column unique_scope text;
alter table jobq_finished add column unique_key blob;
alter table jobq_finished add column unique_scope text;
alter table jobq_dead add column unique_key blob;
alter table jobq_dead add column unique_scope text;
-- the job that had the key when this one was to be redriven
alter table jobq_dead add column duplicate_of integer;

insert into jobq_migrations (version, name) values (2, 'unique');
