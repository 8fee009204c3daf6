-- Which job may run of those with one key: one at a time. Who is to have the grant follows from the
-- jobs; a row whose job is gone is given to the next one, or deleted.
create table if not exists jobq_key_grants (
    job_key varbinary(200) not null primary key,
    job_id bigint not null
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

-- on_block: what becomes of those behind it while it cannot run, 'block' or 'skip'
set @jobq_step = if(
    exists (
        select 1 from information_schema.columns
        where table_schema = database()
          and table_name = 'jobq_jobs'
          and column_name = 'job_key'
    ),
    'do 0',
    'alter table jobq_jobs add column job_key varbinary(200), add column on_block varchar(100)'
);
prepare jobq_step from @jobq_step;
execute jobq_step;
deallocate prepare jobq_step;

set @jobq_step = if(
    exists (
        select 1 from information_schema.columns
        where table_schema = database()
          and table_name = 'jobq_finished'
          and column_name = 'job_key'
    ),
    'do 0',
    'alter table jobq_finished add column job_key varbinary(200), add column on_block varchar(100)'
);
prepare jobq_step from @jobq_step;
execute jobq_step;
deallocate prepare jobq_step;

set @jobq_step = if(
    exists (
        select 1 from information_schema.columns
        where table_schema = database()
          and table_name = 'jobq_dead'
          and column_name = 'job_key'
    ),
    'do 0',
    'alter table jobq_dead add column job_key varbinary(200), add column on_block varchar(100)'
);
prepare jobq_step from @jobq_step;
execute jobq_step;
deallocate prepare jobq_step;

-- The jobs of a key in order.
set @jobq_step = if(
    exists (
        select 1 from information_schema.statistics
        where table_schema = database()
          and table_name = 'jobq_jobs'
          and index_name = 'jobq_jobs_keyed'
    ),
    'do 0',
    'alter table jobq_jobs add index jobq_jobs_keyed (job_key, id)'
);
prepare jobq_step from @jobq_step;
execute jobq_step;
deallocate prepare jobq_step;

-- The band is the priority, or 32767 = next in line, or the priority + 100 = before its priority, or
-- -32768 = waits for its key. (MySQL and MariaDB have no common word for it.)
set @jobq_step = if(
    exists (
        select 1 from information_schema.table_constraints
        where table_schema = database()
          and table_name = 'jobq_jobs'
          and constraint_name = 'jobq_band_is_the_priority'
    ),
    'alter table jobq_jobs
         drop /*!80016 check */ /*M! constraint */ jobq_band_is_the_priority,
         add constraint jobq_band_is_of_the_priority check (
             band in (priority, priority + 100, 32767)
             or (band = -32768 and run_after = 9223372036854775807 and coalesce(wait_reason, '''') = ''key'')
         )',
    'do 0'
);
prepare jobq_step from @jobq_step;
execute jobq_step;
deallocate prepare jobq_step;

insert into jobq_migrations (version, name) values (3, 'keys');
