// Requests to the server, as hooks that return the answer, the error, and a function to repeat the request.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";

export interface CutText {
  text: string;
  length: number;
  part?: string;
}

export interface RunRow {
  name: string;
  status: string;
  is_live?: boolean;
  policy_version?: number;
  step?: number;
  max_steps?: number | null;
  rewards: (number | null)[];
  eval?: number | null;
  model?: string | null;
  is_imported?: boolean;
  created_at?: string;
  updated_at?: string;
  error?: string;
}

export interface Alarm {
  kind: string;
  severity: "error" | "warning";
  text: string;
}

export interface Lease {
  owner: string;
  expires_at: string;
}

export interface Service {
  id: string;
  base_url: string;
  backend: string;
  status: string;
  policy_version: number;
  error: string | null;
  load: { num_running: number; num_waiting: number; token_usage: number } | null;
  heartbeat_at: string;
}

export interface Sampler {
  id: string;
  host: string;
  status: string;
  num_running: number;
  num_finished: number;
  num_output_tokens: number;
  seconds_waiting: Record<string, number>;
  heartbeat_at: string;
}

export interface Overview {
  name: string;
  status: string;
  is_live: boolean;
  policy_version: number;
  admitted_groups: number;
  /** The console's report on the answers before any training, of a run that was interrupted before step 1. */
  first_answers: string | null;
  control: Record<string, unknown> & { sampling_paused: boolean };
  control_problems: string[];
  is_imported: boolean;
  control_log: { at: string; by: string; before: object; after: object }[];
  trainer_leases: Record<string, Lease>;
  progress: {
    records: Record<string, number>;
    eval_records: Record<string, number>;
    num_groups: number;
    num_groups_completed: number;
    num_groups_ready: number;
    num_groups_consumed: number;
    num_output_tokens: number;
  };
  fleet: { now: string; services: Service[]; samplers: Sampler[] };
  alarms: Alarm[];
  reward_by_tag: Record<string, { mean: number; num: number }>;
  created_at: string;
  updated_at: string;
}

type Spread = "seconds" | "staleness" | "masked_tokens" | "dropped" | "branched_records";

export interface Curves {
  num_steps: number;
  /** Steps that one point stands for; above 1, `lows` and `highs` hold their ends. */
  steps_a_point: number;
  step: number[];
  curves: Record<string, (number | null)[]>;
  lows?: Record<string, (number | null)[]>;
  highs?: Record<string, (number | null)[]>;
  spreads: Record<Spread, Record<string, number>[]>;
  totals: Record<Spread, Record<string, number>>;
  recent: { step: number[]; seconds: Record<string, number>[] };
  alarms: (Alarm & { step: number })[];
  evals: { version: number; reward_mean: number | null; low: number | null; high: number | null }[];
}

export interface LedgerEntry {
  status: string;
  step: number | null;
  trained_at: number[];
  reason: string | null;
}

export interface Try {
  record_id: string;
  traj_id: number;
  status: string;
  score: number | null;
  outcome: string | null;
  attempt: number;
  num_turns: number;
  num_output_tokens: number;
  min_version: number | null;
  max_version: number | null;
  ledger: Record<string, LedgerEntry>;
}

export interface GroupRow {
  task_id: string;
  order: number;
  split: string;
  status: string;
  tag: string;
  tags: string[];
  query: string;
  tries: Try[];
}

export interface ForkTry {
  record_id: string;
  traj_id: number;
  status: string;
  score: number | null;
  outcome: string | null;
  answer: string | null;
  error: string | null;
  num_turns: number;
  num_output_tokens: number;
}

export interface ForkOrigin {
  id: string;
  record_id: string;
  task_id: string;
  turn: number;
  version: number;
  is_edited: boolean;
  sampling: Record<string, unknown>;
  created_by: string;
  created_at: string;
}

export interface Fork extends ForkOrigin {
  tries: ForkTry[];
}

export interface Shown {
  messages: { role: string; content: unknown; name?: string; tool_call_id?: string }[];
}

export interface TreeNode {
  id: number;
  parent: number | null;
  depth: number;
  num_tokens: number;
  records: string[];
  is_fork: boolean;
  turns: string[];
  score: number | null;
  advantage: number | null;
  gap: number;
  diverges: boolean;
  text: string | null;
  tail: string | null;
}

/** What the rollouts of a group say about a turn. */
export interface TurnWorth {
  after: number;
  change: number;
  num_leaves: number;
  is_decision: boolean;
}

/** A record among those that leave each other, and the turns that it sampled itself. */
export interface TurnRow {
  record_id: string;
  traj_id: number;
  score: number | null;
  parent: number | null;
  shared: number;
  rule: string | null;
  reason: string;
  turns: { index: number; text: string; credit: number | null; worth: TurnWorth | null }[];
}

/** The turns of a run after which the worth fell most. */
export interface Decisions {
  has_branches: boolean;
  rows: {
    record_id: string;
    task_id: string;
    index: number;
    question: string;
    text: string;
    step: number;
    credit: number | null;
    worth: TurnWorth;
  }[];
}

export interface GroupAnswer extends GroupRow {
  turn_tree: TurnRow[] | null;
  forks: Fork[];
  others: GroupRow[];
  tree: { num_tokens: number; num_flat_tokens: number; is_cut: boolean; nodes: TreeNode[] } | null;
  why?: string;
}

export interface Score {
  scorer: string;
  version: string;
  value: number;
  detail: CutText;
  inputs: CutText;
  parts: Record<string, number>;
  step_scores: (number | null)[];
  scored_at: string;
}

export interface Training {
  consumer: string;
  step: number;
  num_tokens: number;
  num_trained_tokens: number;
  num_clipped_tokens: number;
  masked: Record<string, number>;
  advantage: number | null;
  staleness: number;
  ratio: { mean: number; std: number; min: number; max: number } | null;
}

/** An agent's place in a rollout of several agents. */
export interface Seat {
  name: string;
  stint: number;
  reward: number | null;
  trained: boolean;
}

export interface Turn {
  id: string;
  index: number;
  parent: number | null;
  branch_reason: string | null;
  finish_reason: string;
  server: string;
  model: string;
  trainable: boolean;
  started_at: string;
  finished_at: string;
  version_spans: { version: number; start: number; end: number }[];
  cached_tokens: number;
  num_retractions: number;
  reward: number | null;
  seat: Seat | null;
  advantage: number | null;
  sampling_params: Record<string, unknown>;
  messages: { role: string; content: CutText; images: string[]; rest: CutText | null }[];
  tools: { name: string; description: CutText; schema: CutText }[];
  output: CutText;
  calls: { id: string; name: string; arguments: CutText; format_error: string | null }[];
  results: {
    call_id: string;
    name: string;
    content: CutText;
    is_error: boolean;
    seconds: number;
    images: string[];
  }[];
  num_added: number;
  num_output: number;
  mean_logprob: number | null;
  trainings: Training[];
}

export interface RecordAnswer {
  record: {
    id: string;
    task_id: string;
    traj_id: number;
    status: string;
    outcome: string | null;
    attempt: number;
    final_answer: CutText | null;
    error: CutText | null;
    reward: number | null;
    metrics: Record<string, number>;
    score: Score | null;
    more_scores: Score[];
    attempts: {
      attempt: number;
      fence: number;
      owner: string;
      first_turn: number;
      started_at: string;
      ended_at: string | null;
      ended_by: string | null;
      error: CutText | null;
    }[];
    num_prompt_tokens: number;
    num_output_tokens: number;
    num_tool_calls: number;
    min_version: number | null;
    max_version: number | null;
    started_at: string | null;
    finished_at: string | null;
  };
  task: Record<string, unknown> & {
    query?: CutText;
    answer: CutText | null;
    columns: CutText | null;
    num_generations: number;
    images?: string[];
  };
  fork: ForkOrigin | null;
  attempt: number;
  policy_version: number;
  task_changed: boolean;
  ledger: Record<string, LedgerEntry>;
  num_turns: number;
  start: number;
  next: number | null;
  turns: Turn[];
}

export interface Tokens {
  start: number;
  length: number;
  ids: number[];
  texts: string[] | null;
  logprobs: number[];
  versions: number[];
  trained: { ratios: number[]; entropies: number[] | null; uses: string[] } | null;
}

export interface StepRecord {
  record_id: string;
  task_id: string;
  traj_id: number;
  status: string;
  reason: string | null;
  score: number | null;
  outcome: string | null;
  num_tokens: number;
  min_version: number | null;
  max_version: number | null;
  advantage: number | null;
  ratio: number | null;
  num_trained_tokens: number;
  masked: Record<string, number>;
}

export interface StepAnswer {
  step: number;
  consumer: string;
  figures: Record<string, unknown> | null;
  policy: { version: number; path: string; num_bytes: number; checksum: string | null } | null;
  last: number;
  records: StepRecord[];
}

export interface Errors {
  is_cut: boolean;
  errors: {
    text: string;
    num: number;
    statuses: Record<string, number>;
    records: string[];
    example: string;
  }[];
}

export interface Distributions {
  steps: number[];
  rollouts_a_step: number;
  tool_rollouts_a_step: number;
  columns: {
    record_id: string[];
    step: number[];
    score: (number | null)[];
    outcome: (string | null)[];
    num_turns: number[];
    num_output_tokens: number[];
    num_tool_calls: number[];
    num_tool_errors: (number | null)[];
  };
}

export interface FailureKinds {
  num_groups: number;
  num_rollouts: number;
  kinds: { kind: string; num: number; task_id: string; record_id: string | null; reply: string }[];
  num_tool_rollouts: number;
  times: {
    tool: string;
    num: number;
    num_errors: number;
    median: number;
    p95: number;
    total: number;
    slowest: { record_id: string; turn: number; seconds: number };
  }[];
  tools: { num: number; record_id: string; turn: number; tool: string; text: string }[];
}

export interface QuestionTime {
  task_id: string;
  mean: number;
  low: number;
  high: number;
  num: number;
}

export interface Questions {
  is_cut: boolean;
  num: number;
  num_chosen: number;
  counts: Record<"nobody" | "some" | "everybody", number>;
  times: number[];
  rows: { question: string; text: string; kind: string; change: number; times: Record<string, QuestionTime> }[];
  ids: string[];
  commands: [string, string][];
}

export interface LiveRollouts {
  rollouts: {
    record_id: string;
    attempt: number;
    num_turns: number;
    started_at: string | null;
    last_turn_at: string | null;
    said: string;
    calls: string[];
  }[];
}

/** What a run has pages for. */
export interface RunTabs {
  last_step: number;
  has_evaluations: boolean;
  is_running: boolean;
  has_forks: boolean;
  has_diffs: boolean;
}

/** Of all decisions of a policy diff, or of a part of them. */
export interface DiffPart {
  name: string;
  num_decisions: number;
  flips: number;
  kl: number;
  greedy: number;
  reply_from: number;
  reply_to: number;
  calls_from: Record<string, number>;
  calls_to: Record<string, number>;
}

export interface PolicyDiff {
  _id: { start: string; end: string; where: string };
  at: string;
  num_records: number;
  effective_from: number;
  effective_to: number;
  as_written: number;
  whole: DiffPart;
  flips: {
    before: string;
    after: string;
    tag: string;
    outcome: string;
    num_decisions: number;
    record_id: string;
    turn: number;
    probability_from: number;
    probability_to: number;
    wish: string;
  }[];
  choices: DiffPart[];
  tags: DiffPart[];
  outcomes: DiffPart[];
}

export interface Passage {
  kind: string;
  task_id: string;
  record_id: string | null;
  turn: number | null;
  text: string;
  score: number | null;
}

export interface Passages {
  found: Passage[];
  is_cut: boolean;
  has_words: boolean;
  has_turn_words: boolean;
}

/** A figure in words: what to call it, and what is healthy. */
export interface Words {
  name: string;
  unit: string;
  meaning: string;
  advice: string;
}

/** The path through the example run. */
export interface Tour {
  step: number;
  task_id: string;
  winner: string;
  loser: string;
  turn: number;
}

export interface Session {
  version: string;
  place: string;
  may_control: boolean;
  tour: Tour | null;
  words: Record<"step" | "eval" | "queue" | "sampler" | "trainer", Record<string, Words>>;
}

export type Parameters = Record<string, string | number | null | undefined>;

export function query(parameters: Parameters): string {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") found.set(name, String(value));
  }
  const text = found.toString();
  return text ? `?${text}` : "";
}

export function ofRun(run: string, name: string, parameters: Parameters = {}): string {
  return `/api/runs/${encodeURIComponent(run)}/${name}${query(parameters)}`;
}

/** The key of the pages, from the address to which the token led. A browser keeps it for this port alone. */
function pageKey(): string {
  const given = /^#key=(.+)/.exec(location.hash)?.[1];
  if (given) {
    localStorage.setItem("key", given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return localStorage.getItem("key") ?? "";
}

const KEY = pageKey();
const WITH_KEY = { Authorization: `Bearer ${KEY}` };

/** The address of something that the browser asks for itself, without headers of ours. */
export function withKey(run: string, name: string, parameters: Parameters): string {
  return ofRun(run, name, { ...parameters, access: KEY });
}

export async function ask<T>(url: string, signal?: AbortSignal): Promise<T> {
  return answerOf<T>(await fetch(url, { signal, headers: WITH_KEY }));
}

export async function tell<T>(url: string, body: unknown): Promise<T> {
  const headers = { "Content-Type": "application/json", ...WITH_KEY };
  return answerOf<T>(await fetch(url, { method: "POST", headers, body: JSON.stringify(body) }));
}

async function answerOf<T>(response: Response): Promise<T> {
  const text = await response.text();
  if (response.ok) return JSON.parse(text) as T;
  let said = text;
  try {
    said = (JSON.parse(text) as { error: string }).error;
  } catch {
    // The access guard answers requests without a token in plain text.
  }
  throw new Error(said || `the server answered ${response.status}`);
}

export interface Asked<T> {
  value: T | null;
  error: string | null;
  again: () => void;
}

/** Send a request now and whenever the URL or `tick` changes; the last answer stays until the next one. */
export function useAsk<T>(url: string | null, tick = 0): Asked<T> {
  const [state, set] = useState<{ url: string | null; value: T | null; error: string | null }>({
    url: null,
    value: null,
    error: null,
  });
  const [round, setRound] = useState(0);
  useEffect(() => {
    if (url === null) return;
    const aborter = new AbortController();
    ask<T>(url, aborter.signal).then(
      (value) => set({ url, value, error: null }),
      (error: Error) => {
        if (aborter.signal.aborted) return;
        set((old) => ({ url, value: old.url === url ? old.value : null, error: error.message }));
      },
    );
    return () => aborter.abort();
  }, [url, tick, round]);
  const again = useCallback(() => setRound((old) => old + 1), []);
  const fresh = state.url === url;
  return { value: fresh ? state.value : null, error: fresh ? state.error : null, again };
}

const REFRESH_MS = 2000;

/** A number that grows when a run, or one of its records, changes, at most every two seconds. */
export function useNews(run: string, record?: string): { tick: number; live: boolean } {
  const [tick, setTick] = useState(0);
  const [live, setLive] = useState(false);
  const waiting = useRef<number | null>(null);
  useEffect(() => {
    let source: EventSource | null = null;
    let first = true;
    const close = () => {
      source?.close();
      source = null;
      setLive(false);
    };
    const open = () => {
      if (source || document.hidden) return;
      source = new EventSource(withKey(run, "events", { record }));
      source.onopen = () => setLive(true);
      source.onmessage = () => {
        if (first) {
          first = false;
          return;
        }
        waiting.current ??= window.setTimeout(() => {
          waiting.current = null;
          setTick((old) => old + 1);
        }, REFRESH_MS);
      };
      source.addEventListener("end", () => {
        close();
        document.removeEventListener("visibilitychange", change);
        setTick((old) => old + 1);
      });
      source.onerror = () => setLive(false);
    };
    // A browser opens only a few connections to one server, so hidden tabs close theirs.
    const change = () => (document.hidden ? close() : open());
    open();
    document.addEventListener("visibilitychange", change);
    return () => {
      close();
      document.removeEventListener("visibilitychange", change);
      if (waiting.current !== null) window.clearTimeout(waiting.current);
      waiting.current = null;
    };
  }, [run, record]);
  return { tick, live };
}
