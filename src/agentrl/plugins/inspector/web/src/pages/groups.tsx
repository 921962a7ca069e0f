// The questions of a run in order, one row each: the rollouts as coloured cells, with filters.

import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useRef, useState } from "preact/hooks";
import { Link, useLocation, useSearch } from "wouter-preact";
import { ask, type GroupRow, ofRun, type Parameters, query, type Try, useNews } from "../api";
import {
  Badge, Crumbs, Field, groupPath, Loading, number, Problem, recordPath, runPath, scoreClass, SplitOptions,
  useTitle,
} from "../parts";
import { visible } from "../texts";

const OUTCOMES = [
  "answered", "no_answer", "turns_limit", "length_limit", "time_limit", "tool_calls_limit",
  "repetition", "agent_error",
];
const NUMBERS: [string, string][] = [
  ["min_score", "Score from"],
  ["max_score", "Score to"],
  ["min_spread", "Spread from"],
  ["version", "Version"],
  ["min_attempts", "Attempts from"],
  ["min_tokens", "Tokens from"],
];
const ROW_HEIGHT = 46;

interface Page {
  groups: GroupRow[];
  next: string | null;
  total: number | null;
}

export function GroupsPage({ run }: { run: string }) {
  useTitle(`Groups of ${run}`);
  const search = useSearch();
  const [, go] = useLocation();
  const given = Object.fromEntries(new URLSearchParams(search)) as Record<string, string>;
  const set = (changes: Parameters) =>
    go(`${runPath(run)}/groups${query({ ...given, ...changes })}`, { replace: true });
  const filters = { newest: "1", ...given };
  if (given["newest"] === "0") filters.newest = "";
  return (
    <>
      <Crumbs run={run} items={[["Groups", null]]} />
      <h1>Groups</h1>
      <form class="row filters card" onSubmit={(event) => event.preventDefault()}>
        <Field label="Questions">
          <select value={given["split"] ?? "train"} onChange={(e) => set({ split: e.currentTarget.value })}>
            <SplitOptions />
          </select>
        </Field>
        <Field label="Order">
          <select value={given["newest"] ?? "1"} onChange={(e) => set({ newest: e.currentTarget.value })}>
            <option value="1">newest first</option>
            <option value="0">oldest first</option>
          </select>
        </Field>
        <Field label="Text">
          <input value={given["text"] ?? ""} onChange={(e) => set({ text: e.currentTarget.value })} />
        </Field>
        <Field label="Tool">
          <input value={given["tool"] ?? ""} onChange={(e) => set({ tool: e.currentTarget.value })} />
        </Field>
        <Field label="Tag">
          <input value={given["tag"] ?? ""} onChange={(e) => set({ tag: e.currentTarget.value })} />
        </Field>
        <Field label="Column">
          <input placeholder="name=value" value={given["column"] ?? ""} onChange={(e) => set({ column: e.currentTarget.value })} />
        </Field>
        <Field label="Outcome">
          <select value={given["outcome"] ?? ""} onChange={(e) => set({ outcome: e.currentTarget.value })}>
            <option value="">any</option>
            {OUTCOMES.map((one) => <option key={one} value={one}>{one.replace(/_/g, " ")}</option>)}
          </select>
        </Field>
        {NUMBERS.map(([name, label]) => (
          <Field key={name} label={label}>
            <input
              class="short"
              inputMode="decimal"
              value={given[name] ?? ""}
              onChange={(e) => set({ [name]: e.currentTarget.value.trim() })}
            />
          </Field>
        ))}
        <button type="button" onClick={() => go(`${runPath(run)}/groups`)}>Clear</button>
      </form>
      <Rows key={JSON.stringify(filters)} run={run} filters={filters} />
    </>
  );
}

function Rows({ run, filters }: { run: string; filters: Record<string, string> }) {
  const [groups, setGroups] = useState<GroupRow[]>([]);
  const [next, setNext] = useState<string | null>("");
  const [total, setTotal] = useState<number | null>(null);
  const [error, setError] = useState<string | null>(null);
  const [busy, setBusy] = useState(false);
  const { tick } = useNews(run);
  const box = useRef<HTMLDivElement>(null);
  const load = async (after: string) => {
    setBusy(true);
    try {
      const page = await ask<Page>(ofRun(run, "groups", { ...filters, after }));
      setGroups((old) => (after ? [...old, ...page.groups] : page.groups));
      setNext(page.next);
      setTotal(page.total);
      setError(null);
    } catch (problem) {
      setError((problem as Error).message);
    }
    setBusy(false);
  };
  // New groups are loaded only at the top of the list, so that rows stay in place for a reader who has scrolled.
  useEffect(() => {
    if (tick === 0 || (filters["newest"] && (box.current?.scrollTop ?? 0) < ROW_HEIGHT)) void load("");
  }, [tick]);
  const virtual = useVirtualizer({
    count: groups.length,
    getScrollElement: () => box.current,
    estimateSize: () => ROW_HEIGHT,
    overscan: 8,
  });
  const items = virtual.getVirtualItems();
  const last = items[items.length - 1]?.index ?? -1;
  useEffect(() => {
    // An empty page with a next one reached the server's time limit; the search continues with the next.
    if (next && !busy && !error && last >= groups.length - 10) void load(next);
  }, [last, next, busy, groups.length]);
  return (
    <>
      {error && <Problem text={error} />}
      <div class="row bar-row">
        <span class="quiet" role="status">
          {number(total ?? groups.length)} {(total ?? groups.length) === 1 ? "group" : "groups"}
          {total !== null && next === null && groups.length < total && `, ${number(total - groups.length)} of them not sampled yet`}
          {total === null && next && (busy ? ", looking for more…" : " and more")}
        </span>
        <ul class="legend" aria-label="Cells">
          {[0, 0.25, 0.5, 0.75, 1].map((score) => <li key={score}><span class={`cell ${scoreClass(score)}`}>{cellText(score)}</span></li>)}
          <li><span class="cell score-2 dropped">.5</span> left out of training</li>
          <li><span class="cell state-failed">×</span> failed</li>
          <li><span class="cell state-pending">·</span> waiting or running</li>
        </ul>
      </div>
      {!groups.length && busy && <Loading />}
      <div ref={box} class="rows card" tabIndex={0} role="region" aria-label="Groups">
        <div style={{ height: `${virtual.getTotalSize()}px`, position: "relative" }}>
          {items.map((item) => {
            const group = groups[item.index];
            return group ? (
              <div key={group.task_id} class="group-row" style={{ transform: `translateY(${item.start}px)` }}>
                <Row run={run} group={group} />
              </div>
            ) : null;
          })}
        </div>
      </div>
    </>
  );
}

function Row({ run, group }: { run: string; group: GroupRow }) {
  const steps = new Set(group.tries.flatMap((one) => Object.values(one.ledger).flatMap((e) => e.trained_at)));
  return (
    <>
      <Link class="group-name" href={groupPath(run, group.task_id)} data-row title={group.query}>
        <span class="clip" dir="ltr">{visible(group.query.slice(0, 200)) || group.task_id}</span>
        <span class="quiet clip">
          {group.task_id}
          {[...group.tags, group.tag].filter(Boolean).map((tag) => ` · ${tag}`)}
        </span>
      </Link>
      <span class="cells">
        {group.tries.map((one) => <Cell key={one.record_id} run={run} one={one} />)}
      </span>
      <span class="group-facts quiet">{means(group.tries)}</span>
      <span class="group-end quiet">
        {steps.size > 0 && `step ${[...steps].join(", ")}`}
        {group.status !== "completed" && <Badge kind="live">open</Badge>}
      </span>
    </>
  );
}

/** The mean score, turns and sampled tokens of the rollouts that have ended. */
function means(tries: Try[]): string {
  const mean = (values: number[]) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const scored = tries.filter((one) => one.score !== null);
  if (!scored.length) return "";
  const score = mean(scored.map((one) => one.score ?? 0));
  const [turns, tokens] = [mean(scored.map((one) => one.num_turns)), mean(scored.map((one) => one.num_output_tokens))];
  return `mean ${number(score, 2)} · ${number(turns, 1)} turns · ${number(Math.round(tokens))} tokens`;
}

function cellText(score: number): string {
  return number(score, 1).replace(/^0\./, ".");
}

export function Cell({ run, one }: { run: string; one: Try }) {
  const versions = one.min_version === null ? "" : `, versions ${one.min_version} to ${one.max_version}`;
  const score = one.score === null ? one.status : `score ${number(one.score, 3)}`;
  const dropped = Object.values(one.ledger).find((entry) => entry.reason)?.reason;
  const text = `Rollout ${one.traj_id}: ${score}, ${one.outcome ?? "no outcome"}, ${one.num_turns} turns, ${one.num_output_tokens} tokens${versions}${dropped ? `, dropped: ${dropped}` : ""}`;
  const state = one.status === "scored" ? scoreClass(one.score) : `state-${one.status}`;
  return (
    <Link class={`cell ${state}${dropped ? " dropped" : ""}`} href={recordPath(run, one.record_id)} title={text} aria-label={text}>
      {one.score !== null ? cellText(one.score) : one.status === "failed" ? "×" : "·"}
    </Link>
  );
}
