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
        "an agent sends `top_k: 2**64 - 1`, `stop_token_ids` of 10**6 or 2**70, and other numbers",
        "the run ended",
        "{engine.numbers.refused} of {engine.numbers.tried} are answered with 400; the engine "
        "survives",
        "400",
        (f"{_HTTP}::test_sampling_that_no_model_can_do_is_refused",),
    ),
    Line(
        "1b",
        "a batch fails in the engine's thread",
        "the engine ended, and all its sequences failed",
        "the sequences of the batch fail with 500; all others continue",
        "only the sequences of the batch fail",
        (f"{_HTTP}::test_a_request_that_fails_in_the_engine_ends_alone",),
    ),
    Line(
        "1c",
        "a request crashes every server that it is sent to",
        "6 servers crashed, then the run ended",
        "at most 2 servers crash; then the rollout fails and the request is not sent again",
        "the request is quarantined",
        (
            f"{_UNIT}/inference/client/test_quarantine.py::"
            "test_a_request_that_kills_is_sent_twice_and_its_neighbors_live",
        ),
    ),
    Line(
        "2a",
        "a schema of 20,000 `$ref`s, 1,000 levels of objects, a Lark chain of 20,000 rules",
        "the engine crashed in native code",
        "{engine.grammars.refused} of {engine.grammars.tried} are rejected by a child process "
        "with limits, "
        "within {engine.grammars.seconds:.1f} s",
        "rejected; the engine survives",
        (
            f"{_UNIT}/inference/engine/generation/test_grammar_trial.py::"
            "test_a_grammar_that_kills_is_refused_in_one_line",
        ),
    ),
    Line(
        "2b",
        "the schemas of 2a, and one of 100 kB, are sent to the engine",
        "the engine crashed in native code",
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
        "an agent sends them as its `response_format`",
        "the sampler's event loop was blocked for seconds",
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
        "user `nobody` connects to the private mongod to read answers, change scores and "
        "register a server",
        "all attempts succeeded",
        "{stranger.refused} of {stranger.tried} attempts are denied",
        "all are denied",
        (
            f"{_UNIT}/store/test_private_login.py::"
            "test_another_user_can_neither_read_nor_alter_nor_register",
        ),
    ),
    Line(
        "3b",
        "user `nobody` tries to access the processes, files and ports of a run, and to signal "
        "its processes",
        "it received the API key and the admin key",
        "nothing is read, changed, stopped or impersonated",
        "no access",
        (
            f"{_NEIGHBOURS}::test_another_user_reads_alters_stops_and_impersonates_nothing",
            f"{_UNIT}/inference/test_server_keys.py::"
            "test_a_stranger_in_the_database_is_sent_no_request",
        ),
    ),
    Line(
        "3c",
        "another program of the same user reads a command's memory or environment",
        "it could be read, and was written to core files",
        "access is denied; no core files are written",
        "the process is not dumpable",
        (
            f"{_UNIT}/runtime/processes/test_private_memory.py::"
            "test_no_other_program_of_the_user_reads_a_command",
        ),
    ),
    Line(
        "4a",
        "web pages of other origins post to the engine's control routes",
        "a run was blocked for 190 s",
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
        "a server is paused although no version is being published",
        "it stayed paused for 190 s; `/health` returned 200, and no log mentioned it",
        "it is resumed after {run.paused_seconds:.0f} s, which is logged",
        "it is resumed or replaced, and this is logged",
        (
            f"{_UNIT}/inference/supervisor/test_server_supervisor.py::"
            "test_a_server_paused_without_a_publication_is_resumed_and_it_is_said",
        ),
    ),
    Line(
        "4c",
        "`/update_weight_version` and `/update_weights_from_disk` are called without the admin key",
        "the policy's version was changed, and any path was read",
        "401; the launcher generates both keys",
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
        "an MCP server sends a reply of 3 MB that decompresses to 3 GB",
        "the sampler aborted",
        "rejected; adds {tools.packed.megabytes:.0f} MB",
        "rejected",
        (f"{_TOOLS}/test_odd_servers.py::test_a_compressed_answer_is_refused",),
    ),
    Line(
        "5b",
        "a judge sends a reply of 3 MB that decompresses to 3 GB",
        "the sampler aborted",
        "rejected; adds {tools.judge.megabytes:.0f} MB",
        "rejected",
        (f"{_UNIT}/runtime/http/test_bounded_replies.py::test_a_compressed_reply_is_not_unpacked",),
    ),
    Line(
        "5c",
        "an aggregator (`/mcpapi`) sends an endless reply",
        "6.1 GB, a stall of 17 s",
        "rejected after {tools.aggregator.megabytes:.0f} MB and {tools.aggregator.seconds:.1f} s; "
        "longest stall {tools.aggregator.stall_ms:.0f} ms",
        "≤ 250 ms",
        (f"{_TOOLS}/test_aggregator.py::test_an_exchange_has_a_deadline_and_a_size",),
    ),
    Line(
        "5d",
        "an MCP server lists 200,000 tools",
        "10.8 s",
        "rejected after {tools.many_tools.seconds:.2f} s; "
        "longest stall {tools.many_tools.stall_ms:.0f} ms",
        "≤ 250 ms",
        (
            f"{_TOOLS}/servers/test_admission.py::"
            "test_a_listing_that_cannot_be_offered_is_named_in_one_line",
            f"{_TOOLS}/test_odd_servers.py::test_a_server_that_lists_pages_for_ever_is_refused",
        ),
    ),
    Line(
        "5e",
        "an MCP server describes a tool in 50 MB of text",
        "accepted",
        "rejected; adds {tools.description.megabytes:.0f} MB",
        "rejected",
        (
            f"{_TOOLS}/servers/test_admission.py::"
            "test_a_listing_that_cannot_be_offered_is_named_in_one_line",
        ),
    ),
    Line(
        "5f",
        "a tool returns a result of 600,000 blocks",
        "a stall of 23 s",
        "rejected after {tools.blocks.seconds:.2f} s; longest stall {tools.blocks.stall_ms:.0f} ms",
        "≤ 250 ms",
        (
            f"{_TOOLS}/test_odd_servers.py::test_answers_of_too_many_values_are_observations",
            f"{_TOOLS}/servers/test_admission.py::"
            "test_what_holds_too_many_values_or_goes_too_deep_is_refused_at_once",
        ),
    ),
    Line(
        "5g",
        "an agent sends 60 MB of user text in one call",
        "13.5 GB in the sampler",
        "400; adds {endpoint.user_text.megabytes:.0f} MB, "
        "longest stall {endpoint.user_text.stall_ms:.0f} ms",
        "≤ 250 ms",
        (f"{_RECORDING}::test_what_cannot_fit_is_refused_before_it_is_tokenized",),
    ),
    Line(
        "5h",
        "a client sends 20 MB of text to the engine",
        "4.6 GB; other requests took 26 s",
        "{engine.large.status}; adds {engine.large.megabytes:.0f} MB, "
        "and other requests take {engine.large.neighbour_seconds:.2f} s",
        "rejected before tokenization",
        (
            f"{_HTTP}::test_a_body_of_20_mb_is_not_kept",
            f"{_HTTP}::test_a_text_beyond_the_context_is_refused_before_it_is_tokenized",
        ),
    ),
    Line(
        "5i",
        "a client requests `n=200000`",
        "the request filled the queue",
        "400 above the limit; below it, all sequences are queued, or none",
        "all or none are queued",
        (f"{_HTTP}::test_a_request_that_overfills_the_queue_is_refused_whole",),
    ),
    *(
        Line(
            f"6{letter}",
            tried,
            before,
            f"{{texts.{name}_ms:.2f}} ms; {{texts.{name}_growth:.1f}} times that for twice the "
            f"text",
            "2 times",
            (_TEXTS,),
        )
        for letter, name, tried, before in (
            (
                "a",
                "deepseek",
                "`function<｜tool▁sep｜>` followed by spaces, 1,600 characters",  # noqa: RUF001
                "7.2 s",
            ),
            ("b", "boxed", r"`\boxed{` repeated, 14 kB", "5.5 s"),
            ("c", "mistral", "`[TOOL_CALLS]name` followed by spaces, 200 kB", "quadratic time"),
            (
                "d",
                "judge",
                "` ``` ` followed by spaces in a judge's reply, 200 kB",
                "quadratic time",
            ),
            ("e", "think", "`<think>` repeated, 200 kB", "quadratic time"),
            ("f", "answer", "`<answer>` repeated, 200 kB", "quadratic time"),
            ("g", "think_end", "`</think>` repeated, 200 kB", "quadratic time"),
        )
    ),
    Line(
        "6h",
        "{texts.texts:,} texts are passed to all {texts.readers} parsers of formats, answers and "
        "verdicts",
        "quadratic or cubic time",
        "at most {texts.largest_growth:.1f} times as long for twice the text",
        "2 times, within the noise",
        (
            _TEXTS,
            f"{_UNIT}/rewards/test_hostile_text.py::"
            "test_time_grows_with_the_length_of_random_repetitions",
            f"{_UNIT}/rollout/test_mcp_sampler.py::test_a_long_reply_is_parsed_off_the_event_loop",
        ),
    ),
    Line(
        "7",
        "an agent sends malformed fields: `seed: 2**200`, schemas nested 800 levels deep, "
        "`prompt: [2**70]`, "
        "`repetition_penalty: 5e-324`",
        "503; the rollout was repeated and never scored",
        "{endpoint.malformed.num_400} of {endpoint.malformed.tried} are answered with 400; "
        "the rollout continues",
        "always 400",
        (
            f"{_RECORDING}::"
            "test_a_malformed_body_is_refused_and_is_no_failure_of_the_infrastructure",
            f"{_RECORDING}::test_what_cannot_be_had_is_refused_in_openais_shape",
        ),
    ),
    Line(
        "8",
        "`kill -9` of the private mongod",
        "the run ended within 2 minutes",
        "clients continue after {mongod.seconds:.1f} s on the same port",
        "the run continues",
        (
            f"{_UNIT}/launcher/cluster/test_recovery.py::"
            "test_a_killed_mongod_comes_back_under_its_address_and_its_clients_go_on",
        ),
    ),
    Line(
        "9a",
        "the database's clock steps forward by 1 h",
        "all live leases were lost and counted as failed attempts",
        "{clock.forward.lost} of {clock.forward.live} live leases are lost",
        "none is lost",
        (f"{_UNIT}/store/test_server_clock.py::test_a_step_forward_takes_no_live_lease",),
    ),
    Line(
        "9b",
        "the database's clock steps back by 1 h",
        "a dead sampler's slots were blocked for 1 h",
        "they are free after {clock.back.dead_freed_seconds:.1f} s, with leases of 1.2 s; "
        "{clock.back.lost} of {clock.back.live} live leases are lost",
        "free after one or two lease times",
        (
            f"{_UNIT}/store/test_server_clock.py::"
            "test_a_step_back_does_not_block_the_slots_of_the_dead",
        ),
    ),
)
MEDIUM = (
    Line(
        "10a",
        "16 planted secrets are searched for in `config.yaml` and `runs.config`",
        "12 of 16 were found",
        "{secrets.found} of {secrets.planted} are found",
        "none is found",
        (
            f"{_UNIT}/config/test_loading.py::"
            "test_planted_secrets_reach_no_file_that_is_shown_and_no_line",
        ),
    ),
    Line(
        "10b",
        "planted secrets are searched for in files, documents, logs, arguments and tool servers' "
        "environments",
        "found",
        "found only in the owner's own files",
        "found nowhere else",
        (
            f"{_NEIGHBOURS}::test_planted_secrets_are_in_no_artefact_but_their_owners_own_file",
            f"{_NEIGHBOURS}::test_a_tool_server_has_none_of_them_in_its_environment",
        ),
    ),
    Line(
        "10c",
        "a secret is malformed",
        "the error message repeated it",
        "the error message hides it",
        "hidden",
        (f"{_UNIT}/config/test_loading.py::test_a_mistyped_secret_is_not_repeated",),
    ),
    Line(
        "10d",
        "logs, tool names and `tasks list` contain ESC, OSC and line breaks",
        "a log line was forged, and terminals were controlled",
        "each is printed on one line, escaped",
        "escaped everywhere",
        (
            f"{_UNIT}/runtime/test_logs.py::test_no_text_forges_a_line_or_steers_the_terminal",
            f"{_UNIT}/cli/test_task_commands.py::"
            "test_ids_from_question_files_neither_steer_the_terminal_nor_stop_a_retry",
        ),
    ),
    Line(
        "11a",
        "a checkpoint's `.metadata` contains a command",
        "the command ran",
        "rejected; the command does not run",
        "does not run",
        (
            f""
            f"{_UNIT}/trainer/test_checkpoint.py::test_a_checkpoint_that_others_changed_runs_nothing",
        ),
    ),
    Line(
        "11b",
        "`store import` of `../outside.jsonl`, BSON `Code`, `$set` and truncated documents",
        "imported",
        "rejected; nothing is imported",
        "rejected",
        (
            f"{_UNIT}/store/repositories/test_transfer.py::"
            "test_an_import_takes_data_of_a_run_from_its_folder_and_nothing_else",
        ),
    ),
    Line(
        "11c",
        "`tasks retry` with an id that contains `~abc`",
        "failed for all tasks",
        "retried",
        "works with any id",
        (
            f"{_UNIT}/cli/test_task_commands.py::"
            "test_ids_from_question_files_neither_steer_the_terminal_nor_stop_a_retry",
        ),
    ),
    Line(
        "11d",
        "question files: a compressed line of 1.5 GB, a FIFO, `/dev/zero`, Parquet bombs, a "
        "number of 5,000 digits",
        "unbounded memory and time",
        "{files.refused} of {files.tried} are rejected with a one-line message, within "
        "{files.seconds:.1f} s and "
        "{files.megabytes:,.0f} MB; the compressed line within {files.line_seconds:.1f} s and "
        "{files.line_megabytes:.0f} MB",
        "rejected with a one-line message",
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
        "child processes of `agentrl env up` read its environment variables and the files of "
        "other clients",
        "they could be read",
        "they are not accessible",
        "not accessible",
        (
            f"{_TOOLS}/test_environment.py::"
            "test_servers_of_one_client_reach_neither_secrets_nor_what_belongs_to_another",
        ),
    ),
    Line(
        "12b",
        "the tool server of `--tool_server_command` reads the run's processes and files",
        "they could be read",
        "they are not accessible",
        "not accessible",
        (
            f"{_UNIT}/launcher/cluster/test_local_cluster.py::"
            "test_the_own_tool_server_sees_no_process_and_no_file_of_the_run",
        ),
    ),
    Line(
        "12c",
        "a client opens many sessions of `agentrl env up`",
        "no limit; 20 sessions used 1.3 GB",
        "at most 64 sessions of 4 GB each, unless flags set other limits",
        "limited",
        (f"{_TOOLS}/test_environment.py::test_sessions_and_their_memory_are_bounded",),
    ),
    Line(
        "13",
        "image URLs point to private networks: NAT64, 6to4, `192.0.0.192`, `168.63.129.16`, …",
        "accepted",
        "{addresses.refused} of {addresses.tried} are rejected",
        "rejected",
        (
            f"{_UNIT}/rollout/test_image_library.py::"
            "test_no_way_of_writing_an_address_leads_to_a_private_network",
        ),
    ),
    Line(
        "14",
        "an answer closes its tag in the judge's prompt, or is very long",
        "neither escaped nor limited",
        "random delimiters for each answer; at most 20,000 characters",
        "random delimiters and a limit",
        (
            f"{_UNIT}/rewards/test_judge.py::"
            "test_an_answer_can_neither_close_its_tag_nor_fill_the_prompt",
        ),
    ),
    Line(
        "15a",
        "pods run with MongoDB's root user, passwords in arguments or no security context",
        "root user, passwords in argv, three pods without a security context",
        "one user for each component, passwords in files and environment variables, `restricted` "
        "is enforced",
        "none of these",
        (
            f"{_DEPLOY}::test_each_component_has_a_user_of_its_own_and_none_is_root",
            f"{_DEPLOY}::test_no_password_is_among_arguments",
            f"{_DEPLOY}::test_the_namespace_enforces_what_every_pod_keeps",
        ),
    ),
    Line(
        "15b",
        "pods reach 169.254.169.254 and private networks",
        "allowed",
        "blocked; for Compose, docs/deploy.md gives the firewall rule for the host",
        "blocked",
        (f"{_DEPLOY}::test_nothing_gets_out_to_private_networks_or_the_metadata_service",),
    ),
    Line(
        "15c",
        "a package index serves another file under a known version",
        "it was installed; ten packages had no fixed version",
        "every package of images and builds is pinned by its hash",
        "pinned by hash",
        (f"{_DEPLOY}::test_images_install_nothing_without_a_hash",),
    ),
)
LOW = (
    Line(
        "L1",
        'requests with deeply nested JSON, `stop: [""]`, unpaired surrogates or `text: []`',
        "500",
        "{engine.prompts.refused} of {engine.prompts.tried} are answered with 400, "
        "{engine.prompts.num_500} with 500",
        "400",
        (f"{_HTTP}::test_malformed_prompts_are_refused",),
    ),
    Line(
        "L2",
        "`logit_bias` contains NaN and infinity",
        "the response was invalid JSON",
        "400",
        "400",
        (f"{_HTTP}::test_sampling_that_no_model_can_do_is_refused",),
    ),
    Line(
        "L3",
        "{engine.half_sent.tried:,} clients send half a request",
        "the connections stayed open forever",
        "closed after {engine.half_sent.seconds:.0f} s; "
        "a concurrent request takes {engine.half_sent.neighbour_seconds:.2f} s",
        "closed",
        (
            f"{_UNIT}/runtime/http/test_request_deadlines.py::"
            "test_connections_with_half_a_request_are_closed",
        ),
    ),
    Line(
        "L4",
        "the gateway on loopback is called with the right id and a wrong key",
        "accepted",
        "401",
        "401",
        (f"{_RECORDING}::test_another_key_than_the_rollouts_is_refused",),
    ),
    Line(
        "L5",
        "`--run_name admin`",
        "wrote to MongoDB's own database",
        "rejected",
        "rejected",
        (f"{_UNIT}/store/test_trajectory_store.py::test_a_database_must_be_named",),
    ),
)
FAULTS = (
    *(
        Line(
            f"16{letter}",
            f"a run's {title} is killed",
            "the run ended (exit 1)",
            f"it is restarted, which is logged; the run makes steps again after "
            f"{{run.{name}_seconds:.0f}} s",
            "restarted, a limited number of times",
            (
                "tests/integration/test_supervised_run.py::"
                "test_a_run_rides_out_the_death_of_each_of_its_processes",
            ),
        )
        for letter, name, title in (
            ("a", "trainer", "trainer"),
            ("b", "keeper", "server supervisor"),
            ("c", "mongod", "mongod"),
        )
    ),
    Line(
        "17",
        "faults while records become stale",
        "3 records older than `max_staleness` were trained on in 21 faults",
        "{chaos.trained_stale} in {chaos.faults} faults",
        "0",
        (_CHAOS,),
    ),
    Line(
        "18a",
        "`--fresh --delete_existing` while a run of the same name is alive",
        "the database of the live run was emptied",
        "rejected while a trainer, server supervisor or sampler is alive",
        "rejected",
        (
            f"{_UNIT}/launcher/test_name_is_free.py::test_a_live_trainer_keeps_its_run",
            f"{_UNIT}/launcher/test_name_is_free.py::"
            "test_a_live_sampler_and_a_live_server_keep_their_run",
        ),
    ),
    Line(
        "18b",
        "Ctrl-C is pressed twice during a run",
        "server supervisor, samplers and engine kept running for up to 33 s",
        "all have ended after {run.interrupt_seconds:.1f} s",
        "≤ 5 s",
        (
            "tests/integration/test_ends.py::"
            "test_a_second_signal_leaves_nothing_of_a_run_for_longer_than_five_seconds",
        ),
    ),
    Line(
        "18c",
        "a sampler's clock is two hours off",
        "turns ended before they began",
        "all times come from the database's clock",
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
        "the slowest query of a polling loop, and of a page, at a million records",
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
OVERALL = (
    Line(
        "F",
        "random requests, replies, files and texts, {fuzz.cases:,} cases",
        "only 1,389 requests and 4,092 conversations had been tried",
        "{fuzz.deaths} crashes, {fuzz.answers_500} responses with 500; "
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
        "only 75 faults had been tried",
        "{chaos.lost_turns} turns lost, {chaos.double_trained} records trained twice, "
        "{chaos.incomplete_groups} incomplete groups, "
        "{chaos.attempts_booked_wrongly} attempts counted wrongly",
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
    "Overall": OVERALL,
}
