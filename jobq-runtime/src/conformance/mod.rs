//! One list of cases, run against every database: what a store promises, rule by rule.
//!
//! Cases are named after the sentence they prove; the rule of the contract stands in front.

mod bed;
mod chaos;
mod claim;
mod complete_in;
mod enqueue;
mod expiry;
#[cfg(feature = "postgres")]
mod explain;
mod fence;
mod fields;
#[cfg(feature = "sqlite")]
mod files;
mod heartbeat;
mod keys;
mod late;
mod limits;
mod look;
#[cfg(feature = "mysql")]
mod mysql_plans;
#[cfg(feature = "mysql")]
mod mysql_servers;
mod pause;
mod payloads;
#[cfg(feature = "postgres")]
mod plans;
mod proof;
mod rescue;
mod rows;
mod sample;
mod second_look;
#[cfg(feature = "postgres")]
mod servers;
mod settle;
mod setup;
mod unique;
mod wait;
#[cfg(feature = "postgres")]
mod wake_up;
mod worker;

use bed::Bed;

/// Makes a test of every case, each with tables of its own.
macro_rules! tests {
    ($name:ident, $bed:expr, { $($group:ident: $($case:ident)+;)+ }) => {
        mod $name {
            use super::*;
            $($(
                #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
                async fn $case() {
                    if let Some(bed) = $bed { $group::$case(bed).await }
                }
            )+)+
        }
    };
}

macro_rules! on_every_database {
    ($($cases:tt)+) => {
        #[cfg(feature = "sqlite")]
        tests!(sqlite, Some(Bed::sqlite().await), { $($cases)+ });
        #[cfg(feature = "postgres")]
        tests!(postgres, Some(Bed::postgres().await), { $($cases)+ });
        // scripts/test says when there is no such server.
        #[cfg(feature = "postgres")]
        tests!(postgres18, Bed::postgres18().await, { $($cases)+ });
        #[cfg(feature = "mysql")]
        tests!(mysql, Some(Bed::mysql().await), { $($cases)+ });
        #[cfg(feature = "mysql")]
        tests!(mariadb, Some(Bed::mariadb().await), { $($cases)+ });
        #[cfg(feature = "mysql")]
        tests!(mariadb118, Bed::mariadb118().await, { $($cases)+ });
    };
}

/// For what only a server with many writers at once can get wrong: SQLite has one.
macro_rules! on_every_server {
    ($($cases:tt)+) => {
        #[cfg(feature = "postgres")]
        tests!(server_postgres, Some(Bed::postgres().await), { $($cases)+ });
        #[cfg(feature = "postgres")]
        tests!(server_postgres18, Bed::postgres18().await, { $($cases)+ });
        #[cfg(feature = "mysql")]
        tests!(server_mysql, Some(Bed::mysql().await), { $($cases)+ });
        #[cfg(feature = "mysql")]
        tests!(server_mariadb, Some(Bed::mariadb().await), { $($cases)+ });
        #[cfg(feature = "mysql")]
        tests!(server_mariadb118, Bed::mariadb118().await, { $($cases)+ });
    };
}

/// For what MySQL and MariaDB have of their own: plans, modes, ids, privileges.
macro_rules! on_mysql_and_mariadb_only {
    ($($cases:tt)+) => {
        #[cfg(feature = "mysql")]
        tests!(only_mysql, Some(Bed::mysql().await), { $($cases)+ });
        #[cfg(feature = "mysql")]
        tests!(only_mariadb, Some(Bed::mariadb().await), { $($cases)+ });
        #[cfg(feature = "mysql")]
        tests!(only_mariadb118, Bed::mariadb118().await, { $($cases)+ });
    };
}

/// For what PostgreSQL has of its own: wake-ups, plans, poolers, sessions that lock by snapshot.
///
/// On MySQL and MariaDB a lock is taken of the newest version of a row, whatever the snapshot, so
/// that a cancel is no failure; what fails there is a deadlock. And ids are known before the commit
/// and not before the insert: a connection that breaks while the jobs are on their way has written
/// none, and the error says no more than that.
macro_rules! on_postgres_only {
    ($($cases:tt)+) => {
        #[cfg(feature = "postgres")]
        tests!(only_postgres, Some(Bed::postgres().await), { $($cases)+ });
        #[cfg(feature = "postgres")]
        tests!(only_postgres18, Bed::postgres18().await, { $($cases)+ });
    };
}

/// For what only a file can get wrong.
macro_rules! on_sqlite_only {
    ($($cases:tt)+) => {
        #[cfg(feature = "sqlite")]
        tests!(only_sqlite, Some(Bed::sqlite().await), { $($cases)+ });
    };
}

on_every_database! {
    chaos:
        f2_whatever_happens_at_once_no_job_is_lost_or_settled_twice;
    claim:
        f1_each_claim_raises_the_token_and_the_attempt
        f1_many_claimers_never_share_a_job
        f1_the_first_claims_of_a_process_all_bring_jobs
        o1_higher_priority_first_then_time_then_id
        r5_a_kind_nobody_asked_for_is_never_claimed;
    enqueue:
        e1_a_job_exists_once_its_transaction_commits
        e1_a_job_is_gone_when_its_transaction_rolls_back
        e1_every_target_writes_the_job
        e1_many_jobs_are_written_all_or_none_on_any_connection
        e1_within_writes_to_its_clients_tables_in_one_transaction
        e1_a_dropped_call_writes_all_or_none
        e2_ids_come_in_the_order_of_the_jobs
        e2_ids_come_in_order_also_when_many_enqueue_at_once
        e2_no_jobs_are_no_work
        e2_one_that_is_refused_leaves_none
        e2_one_that_is_refused_leaves_none_in_a_callers_transaction
        e2_one_that_cannot_be_checked_leaves_none;
    fields:
        e3_what_was_asked_for_is_given_back_by_the_claim
        e3_a_delayed_job_is_not_claimed_before_its_time
        e3_run_at_is_kept_to_the_microsecond
        e3_a_time_in_the_past_means_now
        e3_times_count_from_the_statement_and_not_from_begin
        e3_the_ends_of_every_range_are_taken
        e3_values_out_of_range_are_typed_errors_and_write_nothing
        e3_a_queue_that_nobody_serves_keeps_its_jobs
        e7_a_plain_insert_is_a_job
        e7_an_insert_of_a_job_that_none_could_claim_is_refused
        f1_each_queue_of_a_claim_has_its_own_limit
        o1_jobs_of_one_call_are_claimed_in_their_order
        o1_next_in_line_comes_before_every_priority;
    payloads:
        e4_edge_values_come_back_as_they_were
        e4_a_megabyte_comes_back_as_it_was
        e4_the_deepest_nesting_comes_back_and_a_deeper_one_is_refused
        e4_what_json_cannot_hold_is_a_typed_error
        e4_the_payload_limit_is_the_clients
        e4_metadata_and_tags_count_towards_the_payload_limit
        e4_any_text_is_kept_byte_for_byte;
    settle:
        l2_a_claim_changes_token_attempt_and_holder_only
        l2_completing_moves_the_job_to_the_history
        l2_cancelling_moves_the_job_to_the_history
        l2_requeueing_frees_the_job_for_a_later_time
        l2_what_goes_next_is_in_the_express_band_until_its_next_delay
        l2_burying_moves_the_job_to_the_dead_letters
        l2_isolating_changes_nothing_else
        l3_every_attempt_that_did_not_complete_is_kept
        l3_an_interrupted_attempt_is_kept_under_its_number
        l3_a_retention_of_zero_leaves_nothing
        l3_a_retention_of_zero_leaves_nothing_of_a_redriven_job
        l3_a_retention_for_ever_is_kept
        r2_a_delay_for_ever_is_kept
        r2_a_large_result_is_kept_byte_for_byte
        r3_any_error_text_that_was_made_storable_is_kept_whole;
    fence:
        f6_a_job_of_a_closed_session_is_not_isolated
        s3_a_job_to_be_cancelled_is_not_buried
        f2_an_older_token_writes_nothing
        f2_the_right_token_of_another_session_writes_nothing
        f2_a_token_from_the_future_writes_nothing
        f2_after_a_rescue_nothing_is_written
        f2_after_a_rescue_buried_the_job_nothing_is_written
        f2_after_completion_nothing_is_written
        f2_after_completion_without_history_nothing_is_written
        f2_after_a_redrive_nothing_is_written
        f2_an_id_is_never_used_again;
    second_look:
        f2_what_a_lost_reply_had_written_is_found
        f2_what_a_lost_request_had_not_written_is_written
        f2_a_rescue_is_not_mistaken_for_a_lost_reply
        f2_a_lost_reply_whose_job_went_on_writes_nothing
        f2_a_burial_that_was_redriven_is_found
        f2_one_job_twice_in_a_batch_is_written_once
        f2_a_batch_of_300_in_any_order_is_written_job_by_job
        d4_overlapping_batches_never_deadlock_and_write_each_job_once
        s3_a_job_to_be_cancelled_is_not_requeued
        s3_a_job_that_ends_before_it_is_cancelled_has_ended;
    heartbeat:
        e6_the_next_due_job_is_the_earliest_scheduled_one
        f1_a_session_id_can_be_registered_once
        f1_one_expired_session_of_two_stops_the_claim
        f1_without_a_live_session_nothing_is_claimed
        f4_a_closed_session_is_told_so_and_stays_closed
        f4_a_heartbeat_brings_news_of_its_jobs_by_token
        f4_a_heartbeat_does_not_wait_for_an_open_complete_in
        f4_a_heartbeat_extends_the_session_by_its_lease
        f4_a_heartbeat_publishes_how_far_the_worker_has_claimed
        f4_an_expired_session_that_nobody_closed_is_extended
        f4_heartbeats_and_claims_do_not_hold_each_other_up;
    rescue:
        f6_a_lease_of_a_clock_that_stepped_back_expires_too
        f6_a_crash_of_the_last_attempt_is_the_end
        f6_a_crashed_job_that_was_to_be_cancelled_is_cancelled
        f6_a_job_of_a_session_that_does_not_exist_is_found
        f6_a_rescued_job_is_next_in_line_before_the_backlog
        f6_a_session_without_jobs_is_forgotten
        f6_a_sessions_jobs_can_be_listed
        f6_four_rescuers_at_once_rescue_each_job_once
        f6_jobs_of_live_sessions_are_left_alone
        f6_one_rescue_that_is_refused_holds_up_nobody_else
        f6_only_crashes_while_isolated_count_towards_poison
        f6_the_three_counters_do_not_mix
        f6_thousands_of_jobs_are_rescued_in_one_go;
    complete_in:
        f7_a_late_attempt_has_no_effect
        f7_a_retention_of_zero_leaves_nothing
        f7_a_rollback_leaves_the_job_running
        f7_a_settlement_after_it_finds_the_completion
        f7_effect_and_completion_commit_together
        f7_every_kind_of_transaction_will_do
        s3_a_job_that_completes_before_it_stops_is_completed;
    late:
        e1_a_cursor_meets_what_commits_a_moment_late
        e1_a_job_that_committed_late_is_found_and_goes_next
        e1_a_late_job_of_the_express_band_is_found_too
        e1_a_late_job_that_was_claimed_meanwhile_is_left_alone
        e1_no_floor_however_wrong_loses_a_job
        e1_tens_of_thousands_of_late_jobs_are_found_in_two_passes
        e1_what_is_looked_through_has_two_ends
        r5_a_kind_that_no_worker_knows_is_parked_until_one_does
        r5_a_kind_that_only_another_queues_worker_knows_is_parked
        r5_a_kind_whose_workers_have_not_come_there_yet_is_left_alone
        r5_unparking_is_bounded;
    pause:
        o6_a_claim_after_a_pause_leases_nothing_of_it_on_any_worker
        o6_a_kind_is_paused_in_every_queue_and_a_queue_for_every_kind
        o6_a_kind_that_nobody_knows_is_not_woken_while_it_is_paused
        o6_a_name_or_reason_that_cannot_be_is_a_typed_error
        o6_a_pause_is_kept_and_shown_until_it_is_ended
        o6_a_pause_is_of_the_name_that_is_stored
        o6_a_pause_written_by_hand_holds_too
        o6_a_paused_queue_is_claimed_in_order_once_it_is_resumed
        o6_a_worker_that_passed_by_a_paused_kind_comes_back_for_it
        o6_everything_but_claims_goes_on_while_all_is_paused
        o6_jobs_of_a_paused_kind_are_set_aside_and_say_so
        o6_many_jobs_of_a_paused_kind_cost_the_claims_of_others_nothing
        o6_no_pause_is_overlooked_by_claims_at_the_same_time
        o6_resuming_one_of_two_pauses_leaves_the_other
        o6_what_is_paused_is_not_what_comes_next
        o6_what_was_set_aside_too_late_is_found
        o6_a_paused_job_keeps_its_place_among_those_with_its_key;
    limits:
        o3_a_limit_can_be_changed_while_jobs_run
        o3_a_limit_changed_by_hand_holds_too
        o3_a_limit_holds_among_claims_at_the_same_time
        o3_a_limit_is_kept_and_shown_until_it_is_ended
        o3_a_limited_queue_can_be_paused
        o3_a_place_is_free_once_its_job_ends_whatever_the_end
        o3_jobs_with_keys_are_limited_too
        o3_no_more_run_than_the_limit_lets_on_whatever_machine
        o3_other_queues_go_on_and_nothing_is_passed_by
        o4_a_rate_gives_its_burst_and_then_what_comes
        o4_no_more_start_than_the_rate_lets;
    expiry:
        e9_a_bad_expiry_is_a_typed_error
        e9_a_job_that_is_not_started_in_time_is_buried_and_does_not_run
        e9_a_redriven_job_does_not_expire_again
        e9_a_replacing_twin_brings_its_own_time
        e9_a_twin_of_an_expired_job_is_a_new_job
        e9_a_worker_that_dies_before_it_has_buried_a_job_starts_nothing
        e9_an_expired_job_lets_go_of_its_key
        e9_many_that_were_started_in_time_do_not_hide_one_that_was_not
        e9_one_that_is_cancelled_meanwhile_is_cancelled
        e9_only_a_live_session_takes_what_has_expired
        e9_the_time_counts_from_when_the_job_is_due
        e9_what_claims_do_not_meet_is_buried_by_the_sweep
        e9_what_was_started_in_time_is_tried_again_as_ever;
    proof:
        d2_a_pruned_jobs_attempts_are_pruned_with_it
        d2_one_of_many_has_a_duty_and_keeps_it
        d2_only_what_has_expired_is_pruned_and_only_so_much
        e1_a_proven_floor_has_no_pending_job_below_it
        e1_a_worker_begins_where_nothing_is_left_behind
        e1_when_the_clock_steps_back_everything_is_looked_through
        f6_now_and_then_the_sweep_looks_for_orphans;
    look:
        l1_an_unknown_word_is_an_error_and_no_panic
        l3_gone_is_told_apart_from_never_there
        l3_nothing_was_ever_there_before_the_first_job
        m1_jobs_are_counted_by_queue_and_state
        m3_a_job_can_be_looked_up_in_every_state
        m3_dead_and_cancelled_jobs_say_why
        r4_a_cancelled_job_can_be_redriven_by_its_id
        r4_a_cancelled_job_is_redriven_only_if_all_of_the_filter_matches
        r4_a_completed_job_cannot_be_redriven
        r4_a_redriven_job_starts_anew_under_its_old_id_and_token
        r4_dead_letters_are_found_by_queue_kind_and_reason
        r4_four_who_redrive_at_once_make_each_job_once
        r4_redrive_takes_one_some_or_all
        s3_each_job_is_cancelled_as_its_state_allows;
    setup:
        d1_a_good_database_passes_the_check
        d1_a_name_that_cannot_be_is_refused_with_the_cure
        d1_a_name_that_is_no_identifier_is_refused
        d1_a_word_of_sql_will_do_as_a_name
        d1_many_processes_migrate_at_once_and_again
        d1_missing_tables_are_an_error_that_names_the_cure
        d1_newer_tables_are_left_as_they_are
        d1_no_name_meets_the_tables_of_another
        d1_older_tables_are_upgraded_with_all_that_is_in_them
        d1_tables_made_by_hand_are_those_that_migrate_makes
        d1_tables_of_two_names_do_not_mix
        f1_a_view_shows_who_runs_a_job_and_until_when
        s5_a_url_of_another_database_is_refused_with_the_ones_that_will_do;
    keys:
        o2_a_cancelled_job_passes_its_key_on
        o2_a_completion_in_a_transaction_passes_the_key_on
        o2_a_dead_worker_frees_its_key_with_its_lease
        o2_a_key_is_of_all_kinds_and_queues_and_holds_up_no_other
        o2_a_key_stays_with_its_job_in_every_table
        o2_a_worker_that_dies_before_a_turn_is_decided_holds_up_nobody
        o2_jobs_with_one_key_run_one_at_a_time_in_their_order
        o2_keys_for_which_jobs_wait_are_listed_with_why
        o2_many_workers_at_once_keep_every_key_in_order
        o2_one_that_cannot_run_blocks_its_key_or_is_skipped
        o2_one_that_is_scheduled_blocks_those_enqueued_after_it_or_is_skipped
        o2_passing_on_what_is_used_changes_nothing
        o2_the_second_of_a_key_never_runs_before_the_first
        o2_the_sweep_looks_through_all_grants_in_steps
        o2_thousands_behind_one_key_do_not_hold_up_another
        o2_what_a_worker_could_not_pass_on_the_sweep_does
        o2_what_cannot_be_a_key_is_a_typed_error
        o2_what_has_waited_goes_before_its_priority_and_after_higher_ones;
    unique:
        e5_a_debounced_job_is_put_off_but_not_for_ever
        e5_a_duplicate_that_is_an_error_writes_nothing
        e5_a_key_is_of_its_kind_and_of_what_was_chosen
        e5_a_pending_twin_is_replaced_and_a_running_one_is_not
        e5_a_waiting_twin_is_replaced_and_goes_on_waiting
        e5_for_a_time_a_key_is_held_whatever_becomes_of_the_job
        e5_however_a_job_ends_its_key_is_free
        e5_in_a_transaction_at_any_level_a_twin_is_seen
        e5_in_bulk_each_job_is_told_what_became_of_it
        e5_of_many_who_enqueue_twins_at_once_one_writes_it
        e5_redrives_prunes_and_enqueues_at_once_make_no_twins
        e5_the_sweep_forgets_keys
        e5_until_finished_a_job_keeps_its_twins_out
        e5_until_started_a_retry_does_not_take_its_key_again
        e5_what_has_started_is_not_replaced_but_followed
        r4_a_key_for_a_time_is_not_held_again_by_a_redrive
        r4_a_redriven_job_finds_its_key_held_and_stays_dead
        r4_what_holds_a_key_until_it_starts_is_redriven_by_whether_it_has;
}

on_every_server! {
    keys:
        o2_a_process_that_stops_anywhere_does_not_keep_its_keys;
    limits:
        o3_a_process_that_stops_anywhere_does_not_keep_a_limited_queue;
    expiry:
        e9_a_sweep_that_stops_anywhere_keeps_no_expired_job;
    enqueue:
        e1_higher_isolation_levels_commit_and_roll_back_alike;
    second_look:
        f2_a_locked_row_holds_up_nobody_else;
    heartbeat:
        f4_a_claim_that_stops_anywhere_holds_up_no_heartbeat
        f6_a_claim_whose_session_is_closed_meanwhile_leases_nothing
        f6_a_session_is_not_closed_under_a_claim_in_flight;
    rescue:
        f6_a_process_that_stops_anywhere_holds_nobody_up_for_long
        f6_sessions_that_somebody_has_locked_hold_up_no_other
        f6_an_open_complete_in_does_not_hold_up_the_rescue_of_others;
    complete_in:
        f7_a_row_that_is_locked_for_a_moment_is_waited_for
        f7_heartbeats_do_not_disturb_it_at_any_isolation_level
        s3_a_cancel_waits_for_an_open_complete_in;
    proof:
        d2_a_duty_that_was_waited_for_is_whose_it_has_become
        e1_nothing_is_proved_while_an_older_transaction_is_open;
    look:
        r4_a_locked_dead_letter_holds_up_nobody_else;
    unique:
        e5_a_twin_that_came_after_the_snapshot_is_not_overlooked
        e5_a_twin_that_changed_after_the_snapshot_is_not_replaced_in_vain
        e5_an_open_transaction_holds_up_neither_a_twin_nor_others
        e5_half_an_enqueue_keeps_nobody_out
        e5_the_second_of_two_transactions_waits_for_the_first;
}

on_mysql_and_mariadb_only! {
    mysql_plans:
        d4_every_statement_is_led_by_an_index;
    mysql_servers:
        d4_a_claim_never_makes_an_enqueue_wait
        d4_a_deadlock_is_a_serialization_failure_to_the_caller
        e1_a_cancel_leaves_the_applications_connections_alone
        e1_an_insert_that_waited_has_the_time_after_the_wait
        e1_ids_follow_the_sessions_increment_and_others_do_not_mix_in
        e1_many_jobs_are_written_whatever_the_settings
        e1_the_sessions_own_settings_do_not_matter
        e1_without_autocommit_jobs_are_the_callers_to_commit
        e1_without_the_privilege_nothing_is_proved
        e4_text_is_kept_whatever_the_connection_says_it_sends
        f1_the_servers_own_settings_do_not_matter
        f2_a_job_that_was_completed_by_half_is_settled_whole
        f2_killed_statements_leave_no_job_in_two_places_or_none
        m1_what_people_ask_holds_up_no_claim
        s5_a_database_that_does_not_exist_is_named
        s5_a_url_without_a_database_is_refused_with_the_cure
        s5_a_user_without_rights_is_told_which
        s5_a_wrong_password_is_refused_without_showing_it
        s5_no_part_of_a_password_is_ever_shown
        s5_a_server_that_is_not_there_is_named;
}

on_postgres_only! {
    limits:
        o3_a_claim_that_another_was_quicker_than_takes_what_is_left;
    keys:
        o2_only_what_is_still_leased_and_not_to_be_cancelled_is_put_to_wait;
    enqueue:
        e1_a_serialization_failure_is_a_typed_error
        r6_a_broken_connection_names_the_ids_to_look_up;
    complete_in:
        f7_a_cancel_after_the_snapshot_is_a_serialization_failure;
    wake_up:
        e6_a_flood_of_enqueues_sends_few_wake_ups
        e6_a_wake_up_comes_with_the_commit_and_not_before
        e6_an_enqueue_says_where_something_became_claimable
        e6_every_queue_and_band_of_a_call_is_woken
        e6_what_is_no_wake_up_is_ignored
        s2_a_listener_whose_connection_is_cut_says_so;
    setup:
        d1_a_schema_that_is_there_is_used;
    servers:
        f1_the_databases_own_settings_do_not_matter
        s5_a_check_that_cannot_connect_names_the_server
        s5_a_database_of_another_encoding_is_refused_with_the_cure
        s5_a_database_that_does_not_exist_is_named
        s5_a_refused_login_says_what_the_server_said
        s5_a_server_that_is_not_there_is_named
        s5_a_url_that_cannot_be_read_is_shown_without_its_password
        s5_no_part_of_a_password_is_ever_shown
        s7_pgbouncer_in_the_way_is_recognised;
    plans:
        d4_claims_are_hot_updates
        d4_every_statement_touches_only_its_rows
        d4_operations_first_done_on_empty_tables_stay_cheap
        f1_a_claim_does_not_read_what_is_before_its_floor
        f1_a_claim_reads_only_the_rows_that_it_takes
        o6_a_claim_reads_nothing_of_what_is_paused;
}

on_sqlite_only! {
    claim:
        e1_no_claim_has_seen_past_what_an_open_transaction_wrote;
    files:
        d3_a_pool_that_undoes_wal_mode_is_refused_with_the_cure
        d3_two_processes_share_the_file
        e6_nothing_is_sent_between_processes
        s5_a_database_in_memory_is_refused_with_the_cure
        s5_a_file_in_a_missing_folder_is_named_with_the_cure
        s5_a_file_that_can_only_be_read_is_refused_with_the_cure
        s5_a_file_that_is_no_database_is_refused
        s5_a_missing_file_is_made;
}
