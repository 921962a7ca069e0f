// One question: the table of its rollouts, and the tree of the tokens that they share.

import { hierarchy, type HierarchyPointNode, stratify, tree as layout } from "d3-hierarchy";
import { useMemo, useState } from "preact/hooks";
import { Link, useLocation, useSearch } from "wouter-preact";
import { type GroupAnswer, ofRun, type TreeNode, useAsk, useNews } from "../api";
import {
  Badge, Crumbs, diffPath, groupPath, Loading, number, Problem, recordPath, runPath, ScoreChip, scoreClass, Section,
  Status, stepPath, useTitle,
} from "../parts";
import { Block, visible } from "../texts";
import { ForkTable } from "./forks";
import { Cell } from "./groups";
import { TurnTree } from "./turns";

export function GroupPage({ run }: { run: string }) {
  const task = new URLSearchParams(useSearch()).get("task") ?? "";
  useTitle(task);
  const { tick } = useNews(run);
  const { value, error } = useAsk<GroupAnswer>(ofRun(run, "group", { task }), tick);
  const [chosen, choose] = useState<string[]>([]);
  const [, go] = useLocation();
  const crumbs = <Crumbs run={run} items={[["Groups", `${runPath(run)}/groups`], [task, null]]} />;
  if (error && !value) return <>{crumbs}<Problem text={error} /></>;
  if (!value) return <>{crumbs}<Loading /></>;
  const toggle = (id: string) =>
    choose(chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id].slice(-2));
  return (
    <>
      {crumbs}
      <div class="head">
        <h1 class="clip">{task}</h1>
        <Status value={value.status} />
        {[...value.tags, value.tag].filter(Boolean).map((tag) => <Badge key={tag} kind="plain">{tag}</Badge>)}
      </div>
      <Section title="Question"><Block text={value.query} plain label="Question" /></Section>
      <Section
        title="Rollouts"
        aside={
          <button
            type="button"
            disabled={chosen.length !== 2}
            title="Choose two rollouts"
            onClick={() => go(diffPath(run, chosen[0], chosen[1]))}
          >
            Compare {chosen.length || ""}
          </button>
        }
      >
        <div class="scroll" tabIndex={0} role="region" aria-label="Rollouts">
          <table>
            <thead>
              <tr>
                <th scope="col"><span class="hidden">Compare</span></th>
                <th scope="col">Rollout</th><th scope="col">Score</th><th scope="col">Outcome</th>
                <th scope="col" class="num">Turns</th><th scope="col" class="num">Tokens</th>
                <th scope="col" class="num">Versions</th><th scope="col" class="num">Attempts</th>
                <th scope="col">Training</th>
              </tr>
            </thead>
            <tbody>
              {value.tries.map((one) => (
                <tr key={one.record_id}>
                  <td>
                    <input type="checkbox" checked={chosen.includes(one.record_id)}
                      onChange={() => toggle(one.record_id)} aria-label={`Compare rollout ${one.traj_id}`} />
                  </td>
                  <td><Link href={recordPath(run, one.record_id)} data-row>{one.traj_id}</Link></td>
                  <td><ScoreChip score={one.score} /></td>
                  <td>{one.outcome?.replace(/_/g, " ") ?? <Status value={one.status} />}</td>
                  <td class="num">{one.num_turns}</td>
                  <td class="num">{number(one.num_output_tokens)}</td>
                  <td class="num">{one.min_version === null ? "–" : `${one.min_version}–${one.max_version}`}</td>
                  <td class="num">{one.attempt}</td>
                  <td>
                    {Object.entries(one.ledger).map(([name, entry]) => (
                      <span key={name}>
                        <Status value={entry.status} />{" "}
                        {entry.step !== null && <Link href={stepPath(run, entry.step)}>step {entry.step}</Link>}
                        {entry.reason && <span class="quiet"> {entry.reason}</span>}
                      </span>
                    ))}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </Section>
      {value.turn_tree && <TurnTree run={run} task={task} rows={value.turn_tree} />}
      {value.others.length > 0 && (
        <Section title="The same question in other epochs or evaluations" aside={<span class="quiet">a cell opens its rollout</span>}>
          <ul class="times">
            {value.others.map((other) => (
              <li key={other.task_id}>
                <Link href={groupPath(run, other.task_id)} data-row>{other.task_id}</Link>
                <span class="cells">{other.tries.map((one) => <Cell key={one.record_id} run={run} one={one} />)}</span>
                <Link class="quiet" href={diffPath(run, other.tries[0]?.record_id, chosen[0] ?? value.tries[0]?.record_id)}>
                  compare its first rollout with {chosen[0] ? "the selected one" : "the first one here"}
                </Link>
              </li>
            ))}
          </ul>
        </Section>
      )}
      {value.forks.length > 0 && (
        <Section title="Forks" aside={<span class="quiet">continued from a turn, excluded from training</span>}>
          <ForkTable run={run} forks={value.forks} />
        </Section>
      )}
      <Section
        title="Token tree"
        aside={value.tree && (
          <span class="quiet">
            {number(value.tree.num_tokens)} tokens; {number(value.tree.num_flat_tokens)} without sharing
          </span>
        )}
      >
        {value.tree ? <Tree run={run} nodes={value.tree.nodes} /> : <p class="quiet">{value.why}.</p>}
        {value.tree?.is_cut && <p class="quiet">The tree is truncated: only its first branches are shown.</p>}
      </Section>
    </>
  );
}

interface Shown {
  node: TreeNode | null;
}

const WIDTH = 250;
const HEIGHT = 92;

function Tree({ run, nodes }: { run: string; nodes: TreeNode[] }) {
  const [open, setOpen] = useState<number | null>(null);
  const placed = useMemo(() => place(nodes), [nodes]);
  const all = placed.descendants().filter((one) => one.data.node);
  const low = Math.min(...all.map((one) => one.x));
  const high = Math.max(...all.map((one) => one.x));
  const depth = Math.max(...all.map((one) => one.depth));
  const shown = open === null ? null : nodes[open];
  const largest = Math.max(...nodes.map((one) => Math.abs(one.advantage ?? 0)));
  const at = (one: HierarchyPointNode<Shown>) => ({ left: (one.depth - 1) * (WIDTH + 40), top: one.x - low });
  return (
    <>
      <p class="quiet">
        Each branch shows, once, the tokens that its rollouts share. Colors show advantages: orange below 0,
        blue above. A bold frame marks the branch where the scores diverge
        {nodes.some((one) => one.is_fork) && "; dashed frames mark branches of forks only"}.
      </p>
      <div class="tree" tabIndex={0} role="region" aria-label="Token tree">
        <div style={{ width: `${depth * (WIDTH + 40)}px`, height: `${high - low + HEIGHT}px`, position: "relative" }}>
          <svg aria-hidden="true" width={depth * (WIDTH + 40)} height={high - low + HEIGHT}>
            {all.filter((one) => one.parent?.data.node).map((one) => {
              const from = at(one.parent as HierarchyPointNode<Shown>);
              const to = at(one);
              const [x0, y0, x1, y1] = [from.left + WIDTH, from.top + HEIGHT / 2 - 6, to.left, to.top + HEIGHT / 2 - 6];
              return <path key={one.data.node?.id} d={`M${x0},${y0}C${x0 + 20},${y0} ${x1 - 20},${y1} ${x1},${y1}`} />;
            })}
          </svg>
          {all.map((one) => {
            const node = one.data.node as TreeNode;
            const { left, top } = at(one);
            return (
              <button
                key={node.id}
                type="button"
                data-row
                class={`node ${advantageClass(node.advantage, largest)}${node.diverges ? " diverges" : ""}${node.is_fork ? " forked" : ""}`}
                style={{ left: `${left}px`, top: `${top}px` }}
                onClick={() => setOpen(node.id)}
                aria-expanded={open === node.id}
              >
                <span class="node-text" dir="ltr">{node.text === null ? "(no tokenizer on this machine)" : visible(excerpt(node.text, node.tail))}</span>
                <span class="node-facts">
                  {number(node.num_tokens)} tokens · {node.records.length} {node.records.length === 1 ? "rollout" : "rollouts"}{node.is_fork && " of forks"} · advantage {number(node.advantage, 2)}
                  {node.diverges && <b> · scores diverge here</b>}
                </span>
              </button>
            );
          })}
        </div>
      </div>
      {shown && (
        <div class="node-open">
          <p>
            Mean score {number(shown.score, 2)}, mean advantage {number(shown.advantage, 3)}. Tokens{" "}
            {number(shown.depth)} to {number(shown.depth + shown.num_tokens)} of{" "}
            {shown.records.map((id) => <Link key={id} class="tag" href={recordPath(run, id)}>{id}</Link>)}
          </p>
          {shown.text !== null && <Block text={shown.tail === null ? shown.text : `${shown.text}\n […]\n${shown.tail}`} plain label="Text of the branch" />}
        </div>
      )}
    </>
  );
}

/** The start and the end of a branch's text. */
function excerpt(text: string, tail: string | null): string {
  const end = tail ?? text;
  return tail === null && text.length <= 90 ? text : `${text.slice(0, 36)} … ${end.slice(-44)}`;
}

/** The class of an advantage's colour, on a scale set by the largest advantage of the tree. */
function advantageClass(advantage: number | null, largest: number): string {
  return scoreClass(advantage === null ? null : largest ? 0.5 + advantage / (2 * largest) : 0.5);
}

function place(nodes: TreeNode[]): HierarchyPointNode<Shown> {
  // Contexts without shared tokens form separate trees below one hidden root.
  const known = new Set(nodes.map((node) => node.id));
  const rows = [{ id: "root", parentId: "", node: null as TreeNode | null }].concat(
    nodes.map((node) => ({
      id: String(node.id),
      parentId: node.parent === null || !known.has(node.parent) ? "root" : String(node.parent),
      node,
    })),
  );
  const root = stratify<(typeof rows)[number]>().id((row) => row.id).parentId((row) => row.parentId)(rows);
  const shown = hierarchy<Shown>(root.data, (one) =>
    root.find((other) => other.data === one)?.children?.map((child) => child.data),
  );
  return layout<Shown>().nodeSize([HEIGHT + 6, WIDTH])(shown);
}
