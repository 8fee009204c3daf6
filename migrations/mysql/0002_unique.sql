-- Who holds which key: jobs that are twins have the same, and one job at most has it. Whether that
-- job still keeps others out follows from the job (or from expires_at); a row that keeps nobody out
-- any more is taken over by the next job with its key, or pruned.
create table if not exists jobq_uniques (
    unique_key binary(32) not null primary key,
    -- 0 while the transaction that took it has not written its job
    job_id bigint not null,
    scope varchar(100) not null,
    -- for the scopes that do not depend on the job
    expires_at bigint not null default 9223372036854775807,
    -- tells apart that one job has taken the key more than once
    taken bigint not null default 0
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

-- What a job was made unique by, for a later redrive. (MySQL has no `add column if not exists`.)
set @jobq_step = if(
    exists (
        select 1 from information_schema.columns
        where table_schema = database()
          and table_name = 'jobq_jobs'
          and column_name = 'unique_key'
    ),
    'do 0',
    'alter table jobq_jobs add column unique_key binary(32), add column unique_scope varchar(100)'
);
prepare jobq_step from @jobq_step;
execute jobq_step;
deallocate prepare jobq_step;

set @jobq_step = if(
    exists (
        select 1 from information_schema.columns
        where table_schema = database()
          and table_name = 'jobq_finished'
          and column_name = 'unique_key'
    ),
    'do 0',
    'alter table jobq_finished add column unique_key binary(32), add column unique_scope varchar(100)'
);
prepare jobq_step from @jobq_step;
execute jobq_step;
deallocate prepare jobq_step;

-- duplicate_of: the job that had the key when this one was to be redriven
set @jobq_step = if(
    exists (
        select 1 from information_schema.columns
        where table_schema = database()
          and table_name = 'jobq_dead'
          and column_name = 'unique_key'
    ),
    'do 0',
    'alter table jobq_dead add column unique_key binary(32), add column unique_scope varchar(100), add column duplicate_of bigint'
);
prepare jobq_step from @jobq_step;
execute jobq_step;
deallocate prepare jobq_step;

insert into jobq_migrations (version, name) values (2, 'unique');
