-- By when a job has to be started; null = at any time, or it was started.
set @jobq_step = if(
    exists (
        select 1 from information_schema.columns
        where table_schema = database()
          and table_name = 'jobq_jobs'
          and column_name = 'start_by'
    ),
    'do 0',
    'alter table jobq_jobs add column start_by bigint'
);
prepare jobq_step from @jobq_step;
execute jobq_step;
deallocate prepare jobq_step;

-- The jobs that have to be started by a time, for the sweep: an index of jobq_jobs would have an entry for
-- each of the others, too. The job says whether it is still so.
create table if not exists jobq_expiring (
    start_by bigint not null,
    job_id bigint not null,
    primary key (start_by, job_id)
) engine = InnoDB default character set = utf8mb4 collate = utf8mb4_bin;

insert into jobq_migrations (version, name) values (6, 'expiry');
