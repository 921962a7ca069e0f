"""The lines of `hardening.py`: the attack, its effect before, and the required outcome.

The figures before were measured on 2026-11-22, on four real runs that were attacked. `after` is filled
with the figures of this machine: `{part.name}` is a figure of the part that `hardening.py` measures,
`{growth.…}` a figure of `growth.json`. A line without figures states its outcome in words. Every line
names the tests that make the attack.
"""

from dataclasses import dataclass

MEASURED_BEFORE = "2026-11-22"


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    id: str
    tried: str
    before: str
    after: str
    goal: str
    tests: tuple[str, ...]


_UNIT = "tests/unit"
_HTTP = f"{_UNIT}/inference/engine/http/test_hostile_requests.py"
_RECORDING = f"{_UNIT}/rollout/agent/test_recording.py"
_TEXTS = f"{_UNIT}/rewards/test_hostile_text.py::test_time_grows_with_the_length_of_the_text"
_TOOLS = f"{_UNIT}/tools"
_NEIGHBOURS = "tests/integration/test_neighbours.py"
_DEPLOY = f"{_UNIT}/deploy/test_manifests.py"
_CHAOS = (
    "tests/integration/test_chaos.py::test_faults_of_every_kind_lose_nothing_and_do_nothing_twice"
)
_LOOP = (
    "≤ 5 ms",
    f"{_UNIT}/store/collections/test_indexes.py::"
    "test_hot_queries_scan_no_collection_and_sort_nothing",
)
_PAGE = (
    "≤ 200 ms",
    f"{_UNIT}/store/views/test_browsing.py::test_no_page_scans_a_collection",
)

CRITICAL = (
    Line(
        "1a",
        "one agent's `top_k: 2**64 - 1`, `stop_token_ids` of 10**6 or 2**70, and other numbers",
        "the run ended",
        "{engine.numbers.refused} of {engine.numbers.tried} are answered with 400; the engine survives",
        "400",
        (f"{_HTTP}::test_sampling_that_no_model_can_do_is_refused",),
    ),
    Line(
        "1b",
        "a batch that fails in the engine's thread",
        "the engine ended, with all its sequences",
        "its own sequences fail with 500; all others continue",
        "its own sequences",
        (f"{_HTTP}::test_a_request_that_fails_in_the_engine_ends_alone",),
    ),
    Line(
        "1c",
        "a request under whose hands servers die",
        "6 deaths, then the run ended",
        "2 deaths at most, then the outcome of its rollout",
        "quarantine",
        (
            f"{_UNIT}/inference/client/test_quarantine.py::"
            "test_a_request_that_kills_is_sent_twice_and_its_neighbors_live",
        ),
    ),
    Line(
        "2a",
        "a schema of 20,000 `$ref`s, 1,000 levels of objects, a Lark chain of 20,000 rules",
        "native death of the engine",
        "{engine.grammars.refused} of {engine.grammars.tried} are rejected by a child with limits, "
        "within {engine.grammars.seconds:.1f} s",
        "rejected; the engine survives",
        (
            f"{_UNIT}/inference/engine/generation/test_grammar_trial.py::"
            "test_a_grammar_that_kills_is_refused_in_one_line",
        ),
    ),
    Line(
        "2b",
        "the same and a schema of 100 kB, sent to the engine",
        "native death of the engine",
        "{engine.schemas.refused} of {engine.schemas.tried} are answered with 400, "
        "within {engine.schemas.seconds:.1f} s",
        "400",
        (
            f"{_HTTP}::test_a_schema_that_kills_the_compiler_is_refused",
            "tests/contract/test_killers.py::test_a_killing_request_is_stopped_before_the_server",
        ),
    ),
    Line(
        "2c",
        "the same as an agent's `response_format`",
        "the sampler's loop stood still for seconds",
        "{endpoint.schemas.num_400} of {endpoint.schemas.tried} are answered with 400; "
        "longest stall {endpoint.schemas.stall_ms:.0f} ms",
        "≤ 250 ms",
        (
            f"{_UNIT}/rollout/agent/test_structured.py::"
            "test_a_form_that_cannot_be_had_is_refused_in_one_line",
        ),
    ),
    Line(
        "3a",
        "user `nobody` on the private mongod: reads answers, alters scores, registers a server",
        "all of it",
        "{stranger.refused} of {stranger.tried} attempts are denied",
        "nothing",
        (
            f"{_UNIT}/store/test_private_login.py::"
            "test_another_user_can_neither_read_nor_alter_nor_register",
        ),
    ),
    Line(
        "3b",
        "user `nobody` beside a run: processes, files, ports, signals",
        "was sent the API key and the admin key",
        "nothing is read, altered, stopped or impersonated",
        "nothing",
        (
            f"{_NEIGHBOURS}::test_another_user_reads_alters_stops_and_impersonates_nothing",
            f"{_UNIT}/inference/test_vouching.py::"
            "test_a_stranger_in_the_database_is_sent_no_request",
        ),
    ),
    Line(
        "3c",
        "another program of the same user reads a command's memory or environment",
        "read, and in core files",
        "denied; no core files",
        "not dumpable",
        (
            f"{_UNIT}/runtime/processes/test_private_memory.py::"
            "test_no_other_program_of_the_user_reads_a_command",
        ),
    ),
    Line(
        "4a",
        "pages of other origins post to the engine's control routes",
        "a run stood still for 190 s",
        "{engine.pages.refused} of {engine.pages.tried} are rejected",
        "rejected",
        (
            f"{_UNIT}/runtime/http/test_http_guard.py::test_a_web_page_cannot_post",
            f"{_UNIT}/runtime/telemetry/test_prometheus.py::"
            "test_what_a_web_page_asks_is_refused_and_half_a_request_is_not_kept",
        ),
    ),
    Line(
        "4b",
        "a server is paused, and nobody publishes",
        "190 s, `/health` at 200, no word in any log",
        "resumed after {run.paused_seconds:.0f} s, and said",
        "resumed or replaced, and said",
        (
            f"{_UNIT}/inference/supervisor/test_server_supervisor.py::"
            "test_a_server_paused_without_a_publication_is_resumed_and_it_is_said",
        ),
    ),
    Line(
        "4c",
        "`/update_weight_version` and `/update_weights_from_disk` without the key for control",
        "the policy was relabelled, any path was read",
        "401; the launcher makes both keys",
        "401",
        (
            "tests/contract/test_keys.py::test_each_route_takes_its_own_key_and_no_other",
            f"{_UNIT}/launcher/cluster/test_local_cluster.py::"
            "test_every_run_gets_keys_of_its_own_and_what_joins_it_reads_them",
        ),
    ),
)
HIGH = (
    Line(
        "5a",
        "an MCP server's reply of 3 MB that unpacks to 3 GB",
        "the sampler aborted",
        "rejected; {tools.packed.megabytes:.0f} MB",
        "rejected",
        (f"{_TOOLS}/test_odd_servers.py::test_a_compressed_answer_is_refused",),
    ),
    Line(
        "5b",
        "a judge's reply of 3 MB that unpacks to 3 GB",
        "the sampler aborted",
        "rejected; {tools.judge.megabytes:.0f} MB",
        "rejected",
        (f"{_UNIT}/runtime/http/test_bounded_replies.py::test_a_compressed_reply_is_not_unpacked",),
    ),
    Line(
        "5c",
        "an aggregator (`/mcpapi`) that answers without end",
        "6.1 GB, 17 s of stall",
        "rejected after {tools.aggregator.megabytes:.0f} MB and {tools.aggregator.seconds:.1f} s; "
        "longest stall {tools.aggregator.stall_ms:.0f} ms",
        "≤ 250 ms",
        (f"{_TOOLS}/test_aggregator.py::test_an_exchange_has_a_deadline_and_a_size",),
    ),
    Line(
        "5d",
        "a listing of 200,000 tools",
        "10.8 s",
        "rejected after {tools.many_tools.seconds:.2f} s; "
        "longest stall {tools.many_tools.stall_ms:.0f} ms",
        "≤ 250 ms",
        (
            f"{_TOOLS}/test_admission.py::"
            "test_a_listing_that_cannot_be_offered_is_named_in_one_line",
            f"{_TOOLS}/test_odd_servers.py::test_a_server_that_lists_pages_for_ever_is_refused",
        ),
    ),
    Line(
        "5e",
        "a description of 50 MB",
        "accepted",
        "rejected; {tools.description.megabytes:.0f} MB",
        "rejected",
        (
            f"{_TOOLS}/test_admission.py::"
            "test_a_listing_that_cannot_be_offered_is_named_in_one_line",
        ),
    ),
    Line(
        "5f",
        "a result of 600,000 blocks",
        "23 s of stall",
        "rejected after {tools.blocks.seconds:.2f} s; longest stall {tools.blocks.stall_ms:.0f} ms",
        "≤ 250 ms",
        (
            f"{_TOOLS}/test_odd_servers.py::test_answers_of_too_many_values_are_observations",
            f"{_TOOLS}/test_admission.py::"
            "test_what_holds_too_many_values_or_goes_too_deep_is_refused_at_once",
        ),
    ),
    Line(
        "5g",
        "60 MB of user text in one call of an agent",
        "13.5 GB in the sampler",
        "400; {endpoint.user_text.megabytes:.0f} MB, "
        "longest stall {endpoint.user_text.stall_ms:.0f} ms",
        "≤ 250 ms",
        (f"{_RECORDING}::test_what_cannot_fit_is_refused_before_it_is_tokenized",),
    ),
    Line(
        "5h",
        "20 MB of text to the engine",
        "4.6 GB, 26 s for other requests",
        "{engine.large.status}; {engine.large.megabytes:.0f} MB, "
        "{engine.large.neighbour_seconds:.2f} s for other requests",
        "rejected before tokenization",
        (
            f"{_HTTP}::test_a_body_of_20_mb_is_not_kept",
            f"{_HTTP}::test_a_text_beyond_the_context_is_refused_before_it_is_tokenized",
        ),
    ),
    Line(
        "5i",
        "`n=200000`",
        "the queue was full",
        "400 where it is beyond the bound, else whole or not at all",
        "whole or not at all",
        (f"{_HTTP}::test_a_request_that_overfills_the_queue_is_refused_whole",),
    ),
    *(
        Line(
            f"6{letter}",
            tried,
            before,
            f"{{texts.{name}_ms:.2f}} ms; {{texts.{name}_growth:.1f}} times as long for twice the text",
            "twice",
            (_TEXTS,),
        )
        for letter, name, tried, before in (
            ("a", "deepseek", "`function<｜tool▁sep｜>` and blanks, 1,600 characters", "7.2 s"),  # noqa: RUF001
            ("b", "boxed", r"`\boxed{` again and again, 14 kB", "5.5 s"),
            ("c", "mistral", "`[TOOL_CALLS]name` and blanks, 200 kB", "grew with the square"),
            ("d", "judge", "a judge's ` ``` ` and blanks, 200 kB", "grew with the square"),
            ("e", "think", "`<think>` again and again, 200 kB", "grew with the square"),
            ("f", "answer", "`<answer>` again and again, 200 kB", "grew with the square"),
            ("g", "think_end", "`</think>` again and again, 200 kB", "grew with the square"),
        )
    ),
    Line(
        "6h",
        "{texts.texts:,} texts against all {texts.readers} readers of formats, answers and verdicts",
        "square or cube",
        "{texts.largest_growth:.1f} times as long at most for twice the text",
        "twice, within the noise",
        (
            _TEXTS,
            f"{_UNIT}/rewards/test_hostile_text.py::"
            "test_time_grows_with_the_length_of_random_repetitions",
            f"{_UNIT}/rollout/test_mcp_sampler.py::test_a_long_reply_is_parsed_off_the_event_loop",
        ),
    ),
    Line(
        "7",
        "what an agent sends wrong: `seed: 2**200`, 800-deep schemas, `prompt: [2**70]`, "
        "`repetition_penalty: 5e-324`",
        "503, replayed, never scored",
        "{endpoint.malformed.num_400} of {endpoint.malformed.tried} are answered with 400; "
        "the rollout continues",
        "400, always",
        (
            f"{_RECORDING}::"
            "test_a_malformed_body_is_refused_and_is_no_failure_of_the_infrastructure",
            f"{_RECORDING}::test_what_cannot_be_had_is_refused_in_openais_shape",
        ),
    ),
    Line(
        "8",
        "`kill -9` of the private mongod",
        "the run ended within 2 min",
        "clients continue after {mongod.seconds:.1f} s, on the same port",
        "survived",
        (
            f"{_UNIT}/launcher/cluster/test_recovery.py::"
            "test_a_killed_mongod_comes_back_under_its_address_and_its_clients_go_on",
        ),
    ),
    Line(
        "9a",
        "the database's clock steps by +1 h",
        "all live leases, booked as failed attempts",
        "{clock.forward.lost} of {clock.forward.live} live leases",
        "0",
        (f"{_UNIT}/store/test_server_clock.py::test_a_step_forward_takes_no_live_lease",),
    ),
    Line(
        "9b",
        "it steps back by 1 h",
        "a dead sampler's slots were blocked for 1 h",
        "they are free after {clock.back.dead_freed_seconds:.1f} s, with leases of 1.2 s; "
        "{clock.back.lost} of {clock.back.live} live leases are lost",
        "a lease or two",
        (
            f"{_UNIT}/store/test_server_clock.py::"
            "test_a_step_back_does_not_block_the_slots_of_the_dead",
        ),
    ),
)
MEDIUM = (
    Line(
        "10a",
        "16 planted secrets in `config.yaml` and `runs.config`",
        "12 of 16",
        "{secrets.found} of {secrets.planted}",
        "0",
        (
            f"{_UNIT}/config/test_loading.py::"
            "test_planted_secrets_reach_no_file_that_is_shown_and_no_line",
        ),
    ),
    Line(
        "10b",
        "planted secrets in files, documents, logs, arguments and tool servers' environments",
        "there",
        "only in the owner's own files",
        "none",
        (
            f"{_NEIGHBOURS}::test_planted_secrets_are_in_no_artefact_but_their_owners_own_file",
            f"{_NEIGHBOURS}::test_a_tool_server_has_none_of_them_in_its_environment",
        ),
    ),
    Line(
        "10c",
        "a mistyped secret",
        "repeated in the message",
        "hidden",
        "hidden",
        (f"{_UNIT}/config/test_loading.py::test_a_mistyped_secret_is_not_repeated",),
    ),
    Line(
        "10d",
        "ESC, OSC and line breaks in logs, tool names and `tasks list`",
        "a log line was forged, terminals were steered",
        "one line each, in escapes",
        "one sanitizer",
        (
            f"{_UNIT}/runtime/test_logs.py::test_no_text_forges_a_line_or_steers_the_terminal",
            f"{_UNIT}/cli/test_task_commands.py::"
            "test_ids_from_question_files_neither_steer_the_terminal_nor_stop_a_retry",
        ),
    ),
    Line(
        "11a",
        "a checkpoint whose `.metadata` runs a command",
        "it ran",
        "rejected; nothing runs",
        "nothing runs",
        (
            f"{_UNIT}/trainer/test_checkpoint.py::test_a_checkpoint_that_others_changed_runs_nothing",
        ),
    ),
    Line(
        "11b",
        "`store import` of `../outside.jsonl`, BSON `Code`, `$set`, half documents",
        "taken",
        "rejected; nothing is left of it",
        "rejected",
        (
            f"{_UNIT}/store/repositories/test_transfer.py::"
            "test_an_import_takes_data_of_a_run_from_its_folder_and_nothing_else",
        ),
    ),
    Line(
        "11c",
        "`tasks retry` with an id that holds `~abc`",
        "failed for all",
        "retried",
        "any id",
        (
            f"{_UNIT}/cli/test_task_commands.py::"
            "test_ids_from_question_files_neither_steer_the_terminal_nor_stop_a_retry",
        ),
    ),
    Line(
        "11d",
        "question files: a packed line of 1.5 GB, a FIFO, `/dev/zero`, Parquet bombs, 5,000 digits",
        "memory and time without end",
        "{files.refused} of {files.tried} are rejected in one line, within {files.seconds:.1f} s and "
        "{files.megabytes:,.0f} MB; the packed line within {files.line_seconds:.1f} s and "
        "{files.line_megabytes:.0f} MB",
        "rejected in one line",
        (
            f"{_UNIT}/datasets/test_entries.py::"
            "test_a_file_without_end_is_refused_in_one_line_and_little_memory",
            f"{_UNIT}/datasets/test_entries.py::test_a_device_or_a_pipe_is_refused",
            f"{_UNIT}/datasets/test_entries.py::test_a_number_of_five_thousand_digits_is_refused",
            f"{_UNIT}/datasets/test_entries.py::test_an_image_that_is_no_file_is_a_bad_line",
        ),
    ),
    Line(
        "12a",
        "children of `agentrl env up` read its environment, and files of other clients",
        "read",
        "not there for them",
        "not reachable",
        (
            f"{_TOOLS}/test_environment.py::"
            "test_servers_of_one_client_reach_neither_secrets_nor_what_belongs_to_another",
        ),
    ),
    Line(
        "12b",
        "the tool server of `--tool_server_command` reads the run's processes and files",
        "read",
        "not there for it",
        "not reachable",
        (
            f"{_UNIT}/launcher/cluster/test_local_cluster.py::"
            "test_the_own_tool_server_sees_no_process_and_no_file_of_the_run",
        ),
    ),
    Line(
        "12c",
        "sessions of `agentrl env up`",
        "no bound; 20 were 1.3 GB",
        "64 sessions of 4 GB at most, unless flags say otherwise",
        "bounded",
        (f"{_TOOLS}/test_environment.py::test_sessions_and_their_memory_are_bounded",),
    ),
    Line(
        "13",
        "images on addresses of private networks: NAT64, 6to4, `192.0.0.192`, `168.63.129.16`, …",
        "let through",
        "{addresses.refused} of {addresses.tried} are rejected",
        "rejected",
        (
            f"{_UNIT}/rollout/test_image_library.py::"
            "test_no_way_of_writing_an_address_leads_to_a_private_network",
        ),
    ),
    Line(
        "14",
        "an answer that closes its tag in the judge's prompt, or is endless",
        "neither escaped nor bounded",
        "random delimiters for each answer; at most 20,000 characters",
        "random delimiters, a limit",
        (
            f"{_UNIT}/rewards/test_judge.py::"
            "test_an_answer_can_neither_close_its_tag_nor_fill_the_prompt",
        ),
    ),
    Line(
        "15a",
        "pods: MongoDB's root user, passwords in arguments, no security context",
        "root user, in argv, three without",
        "a user for each component, files and environment, `restricted` enforced",
        "none of it",
        (
            f"{_DEPLOY}::test_each_component_has_a_user_of_its_own_and_none_is_root",
            f"{_DEPLOY}::test_no_password_is_among_arguments",
            f"{_DEPLOY}::test_the_namespace_enforces_what_every_pod_keeps",
        ),
    ),
    Line(
        "15b",
        "pods reach 169.254.169.254 and private networks",
        "open",
        "closed; for Compose docs/deploy.md names the rule of the host's firewall",
        "closed",
        (f"{_DEPLOY}::test_nothing_gets_out_to_private_networks_or_the_metadata_service",),
    ),
    Line(
        "15c",
        "an index serves another file under a known version",
        "installed; ten packages floated",
        "every package of images and builds has a hash",
        "hashes",
        (f"{_DEPLOY}::test_images_install_nothing_without_a_hash",),
    ),
)
LOW = (
    Line(
        "L1",
        'nested JSON, `stop: [""]`, lone surrogates, `text: []`',
        "500",
        "{engine.prompts.refused} of {engine.prompts.tried} are answered with 400, "
        "{engine.prompts.num_500} with 500",
        "400",
        (f"{_HTTP}::test_malformed_prompts_are_refused",),
    ),
    Line(
        "L2",
        "`logit_bias` of NaN and infinity",
        "invalid JSON",
        "400",
        "400",
        (f"{_HTTP}::test_sampling_that_no_model_can_do_is_refused",),
    ),
    Line(
        "L3",
        "{engine.half_sent.tried:,} half-sent requests",
        "open forever",
        "closed after {engine.half_sent.seconds:.0f} s; "
        "{engine.half_sent.neighbour_seconds:.2f} s for a concurrent request",
        "closed",
        (
            f"{_UNIT}/runtime/http/test_request_deadlines.py::"
            "test_connections_with_half_a_request_are_closed",
        ),
    ),
    Line(
        "L4",
        "the gateway on loopback, with the right id and a wrong key",
        "taken",
        "401",
        "401",
        (f"{_RECORDING}::test_another_key_than_the_rollouts_is_refused",),
    ),
    Line(
        "L5",
        "`--run_name admin`",
        "wrote into MongoDB's own database",
        "rejected",
        "rejected",
        (f"{_UNIT}/store/test_trajectory_store.py::test_a_database_must_be_named",),
    ),
)
FAULTS = (
    *(
        Line(
            f"16{letter}",
            f"the {name} of a run is killed",
            "the run ended (exit 1)",
            f"the run makes steps again after {{run.{name}_seconds:.0f}} s, and says so",
            "restarted within bounds",
            (
                "tests/integration/test_supervised_run.py::"
                "test_a_run_rides_out_the_death_of_each_of_its_processes",
            ),
        )
        for letter, name in (("a", "trainer"), ("b", "keeper"), ("c", "mongod"))
    ),
    Line(
        "17",
        "staleness of trained records under faults",
        "3 above `max_staleness` after 21 faults",
        "{chaos.trained_stale} after {chaos.faults} faults",
        "0",
        (_CHAOS,),
    ),
    Line(
        "18a",
        "`--fresh --delete_existing` beside a live run of the name",
        "emptied under its feet",
        "rejected while a trainer, keeper or sampler is alive",
        "rejected",
        (
            f"{_UNIT}/launcher/test_name_is_free.py::test_a_live_trainer_keeps_its_run",
            f"{_UNIT}/launcher/test_name_is_free.py::"
            "test_a_live_sampler_and_a_live_server_keep_their_run",
        ),
    ),
    Line(
        "18b",
        "two Ctrl-C during a run",
        "keeper, samplers and engine stayed for up to 33 s",
        "all are gone after {run.interrupt_seconds:.1f} s",
        "≤ 5 s",
        (
            "tests/integration/test_ends.py::"
            "test_a_second_signal_leaves_nothing_of_a_run_for_longer_than_five_seconds",
        ),
    ),
    Line(
        "18c",
        "a sampler whose clock is two hours off",
        "turns that end before they begin",
        "times come from the database's clock",
        "one clock",
        (f"{_UNIT}/store/test_server_clock.py::test_a_turn_is_dated_by_the_servers_clock",),
    ),
    *(
        Line(
            f"19{letter}",
            f"{tried} at a million records",
            before,
            f"{{growth.sizes.-1.{figure}:.1f}} ms",
            goal,
            (test,),
        )
        for letter, tried, before, figure, goal, test in (
            ("a", "`first_open_order`", "128 ms", "loops_ms.first_open_order", *_LOOP),
            ("b", "counting tasks", "30 ms", "loops_ms.eval_completed", *_LOOP),
            ("c", "`consumed_groups`", "62 ms", "loops_ms.is_exhausted", *_LOOP),
            ("d", "the progress display", "402 ms", "loops_ms.progress", *_LOOP),
            ("e", "`inspect runs`", "2.0 s", "pages_ms.runs", *_PAGE),
            ("f", "`inspect failures`", "1.1 s", "pages_ms.failures", *_PAGE),
            ("g", "`tasks stats`", "32 s, 212 MB", "pages_ms.tasks_stats", *_PAGE),
        )
    ),
    Line(
        "19h",
        "the slowest query in a loop, and behind a page, at a million records",
        "402 ms, 32 s",
        "{growth.slowest_loop_ms:.1f} ms, {growth.slowest_page_ms:.1f} ms",
        "≤ 5 ms, ≤ 200 ms",
        (_LOOP[1], _PAGE[1]),
    ),
    Line(
        "19i",
        "adding a million questions",
        "338 s, 122 MB",
        "{growth.sizes.-1.adding.seconds:.0f} s, {growth.sizes.-1.adding.megabytes:.0f} MB",
        "≤ 120 s",
        (f"{_UNIT}/datasets/test_entries.py::test_a_million_tasks_are_asked_in_little_memory",),
    ),
)
ALTOGETHER = (
    Line(
        "F",
        "random requests, replies, files and texts, {fuzz.cases:,} cases",
        "1,389 requests and 4,092 conversations had been tried",
        "{fuzz.deaths} deaths, {fuzz.answers_500} answers of 500; "
        "longest stall {fuzz.longest_stall_ms:.0f} ms",
        "0, 0, ≤ 250 ms",
        (
            f"{_UNIT}/inference/dialects/test_fuzzed_endpoint.py::"
            "test_what_the_description_allows_and_what_it_does_not_is_answered",
            f"{_UNIT}/inference/engine/http/test_fuzzed_requests.py::"
            "test_the_engine_answers_what_its_description_allows_and_what_it_does_not",
        ),
    ),
    Line(
        "C",
        "{chaos.faults} faults of processes, network, disk, clock and replica set",
        "75 faults had been tried",
        "{chaos.lost_turns} turns lost, {chaos.double_trained} trained twice, "
        "{chaos.incomplete_groups} groups incomplete, "
        "{chaos.attempts_booked_wrongly} attempts booked wrongly",
        "0, 0, 0, 0",
        (_CHAOS,),
    ),
)
GROUPS: dict[str, tuple[Line, ...]] = {
    "Critical": CRITICAL,
    "High": HIGH,
    "Medium": MEDIUM,
    "Low": LOW,
    "Faults and growth": FAULTS,
    "Altogether": ALTOGETHER,
}
