// Search for words in questions, answers, judgments and turns.

import { Link, useSearch } from "wouter-preact";
import { ofRun, type Passages, useAsk } from "../api";
import { Badge, Crumbs, groupPath, Loading, Problem, recordPath, ScoreChip, useTitle } from "../parts";
import { Excerpt } from "../texts";

export function SearchPage({ run }: { run: string }) {
  const q = new URLSearchParams(useSearch()).get("q") ?? "";
  useTitle(`“${q}” in ${run}`);
  const { value, error } = useAsk<Passages>(q ? ofRun(run, "search", { q }) : null);
  const words = [...q.toLowerCase().matchAll(/"([^"]+)"|([^\s"]+)/g)].map((one) => one[1] ?? one[2] ?? "");
  return (
    <>
      <Crumbs run={run} items={[["Search", null]]} />
      <h1>Search: {q || "no words given"}</h1>
      {error && <Problem text={error} />}
      {q && !value && !error && <Loading />}
      {value && (
        <>
          <p class="quiet" role="status">
            {value.found.length === 0 ? "No text contains" : value.found.length === 1 && !value.is_cut ? "1 text contains" : `${value.found.length}${value.is_cut ? " and more" : ""} texts contain`}{" "}
            all of these words, and phrases in quotation marks as they stand.
            {!value.has_words && " This run was written by an earlier release: its texts are not indexed."}
            {!value.has_turn_words && (
              <> Model outputs and tool results are not indexed; <code>agentrl ui --index_texts --run_name {run}</code> indexes them.</>
            )}
          </p>
          <ul class="passages">
            {value.found.map((one, at) => (
              <li key={at} class="card">
                <Link
                  data-row
                  href={one.record_id
                    ? recordPath(run, one.record_id, one.turn === null ? {} : { turn: String(one.turn) })
                    : groupPath(run, one.task_id)}
                >
                  {one.record_id ?? one.task_id}{one.turn !== null && `, turn ${one.turn}`}
                </Link>{" "}
                <Badge kind="plain">{one.kind}</Badge>{" "}
                {one.score !== null && <ScoreChip score={one.score} />}
                <div><Excerpt text={one.text} words={words} /></div>
              </li>
            ))}
          </ul>
        </>
      )}
    </>
  );
}
