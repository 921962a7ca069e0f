// What two versions of the policy decide differently: the results of `agentrl diff`.

import type { ComponentChildren } from "preact";
import { Link, useLocation, useSearch } from "wouter-preact";
import { type DiffPart, ofRun, type PolicyDiff, query, useAsk } from "../api";
import { Ago, Facts, Field, Loading, number, Problem, recordPath, RunHead, runPath, Section } from "../parts";
import { visible } from "../texts";
import { signed } from "./turns";

const LARGEST_SHOWN = 60;

export function PolicyDiffsPage({ run }: { run: string }) {
  const { value, error } = useAsk<PolicyDiff[]>(ofRun(run, "diffs"));
  const [, go] = useLocation();
  const asked = new URLSearchParams(useSearch()).get("show");
  const shown = value?.find((one) => titleOf(one) === asked) ?? value?.[0];
  return (
    <>
      <RunHead run={run} title="Policy diffs" />
      {error && <Problem text={error} />}
      {!value && !error && <Loading />}
      {value && !shown && (
        <p>
          No two versions were compared yet: <code>agentrl diff {run} --from 0 --to VERSION</code> lists the tool calls
          and answers whose choice changed, in the situations that this run stored.
        </p>
      )}
      {value && shown && (
        <>
          <Field label="Comparison">
            <select value={titleOf(shown)} onChange={(event) => go(`${runPath(run)}/diffs${query({ show: event.currentTarget.value })}`, { replace: true })}>
              {value.map((one) => <option key={titleOf(one)} value={titleOf(one)}>{titleOf(one)}</option>)}
            </select>
          </Field>
          <Shown run={run} diff={shown} />
        </>
      )}
    </>
  );
}

function titleOf({ _id }: PolicyDiff): string {
  return `${_id.start} → ${_id.end}${_id.where ? `, where ${_id.where}` : ""}`;
}

function percent(share: number): string {
  return `${(100 * share).toFixed(1)}%`;
}

/** The choices with the changes of their expected calls, the largest first. */
function changes(part: DiffPart): [string, number][] {
  const found = Object.entries(part.calls_from).map(([name, calls]): [string, number] => [name, (part.calls_to[name] ?? 0) - calls]);
  return found.sort(([, a], [, b]) => Math.abs(b) - Math.abs(a));
}

function Shown({ run, diff }: { run: string; diff: PolicyDiff }) {
  const { whole } = diff;
  const made = new Map(diff.choices.map((one) => [one.name, one]));
  return (
    <>
      <Facts wide rows={[
        ["Decisions", `${number(whole.num_decisions)} of ${number(diff.num_records)} records`, "Sampled turns: a call of a tool, or an answer in words"],
        ["Flips", percent(whole.flips), "Decisions whose likeliest choice differs between the two models"],
        ["KL", `${number(whole.kl, 4)} nats per token`, "Estimate of the divergence over the sampled tokens (Schulman's k2)"],
        ["Likeliest tokens", `${percent(whole.greedy)} differ`, "Share of the sampled tokens in whose places the likeliest tokens differ"],
        ["Effective samples", `${percent(diff.effective_from)} → ${percent(diff.effective_to)}`, "How well the stored decisions stand for those of each model"],
        ["Computed", <Ago at={diff.at} />],
      ]} />
      <Section title="Choices" hint="Expected calls per decision under both models, the largest change first">
        <Table name="Choices" heads={["Choice", "#Calls before", "#After", "#Change", "#Made", "#Probability of the reply"]}>
          {changes(whole).map(([name, change]) => {
            const own = made.get(name);
            return (
              <tr key={name}>
                <td><code dir="ltr">{visible(name)}</code></td>
                <td class="num">{number(whole.calls_from[name])}</td><td class="num">{number(whole.calls_to[name])}</td>
                <td class="num"><b>{signed(change, 4)}</b></td>
                <td class="num">{number(own?.num_decisions ?? 0)}</td>
                <td class="num">{own ? `${number(own.reply_from)} → ${number(own.reply_to)}` : "–"}</td>
              </tr>
            );
          })}
        </Table>
      </Section>
      <Section title="Flips" hint="Decisions whose likeliest choice differs, the largest group first">
        {!diff.flips.length && <p class="quiet">No decision flips.</p>}
        {diff.flips.length > 0 && (
          <Table name="Flips" heads={["From", "To", "#Decisions", "Tag", "Outcome", "#Probability", "It writes", "Record"]}>
            {diff.flips.slice(0, LARGEST_SHOWN).map((one) => (
              <tr key={`${one.before}/${one.after}/${one.tag}/${one.outcome}`}>
                <td><code dir="ltr">{visible(one.before)}</code></td><td><code dir="ltr">{visible(one.after)}</code></td>
                <td class="num">{number(one.num_decisions)}</td><td>{visible(one.tag)}</td><td>{one.outcome}</td>
                <td class="num">{number(one.probability_from, 2)} → {number(one.probability_to, 2)}</td>
                <td class="did"><code dir="ltr">{visible(one.wish)}</code></td>
                <td><Link href={recordPath(run, one.record_id, { turn: String(one.turn) })} data-row>{one.record_id}, turn {one.turn}</Link></td>
              </tr>
            ))}
          </Table>
        )}
      </Section>
      <Parts title="Tags" parts={diff.tags} />
      <Parts title="Outcomes" parts={diff.outcomes} />
    </>
  );
}

function Parts({ title, parts }: { title: string; parts: DiffPart[] }) {
  if (!parts.length) return null;
  return (
    <Section title={title}>
      <Table name={title} heads={["Name", "#Decisions", "#Flips", "#KL", "#Likeliest tokens", "Largest change"]}>
        {parts.map((part) => {
          const [name, change] = changes(part)[0] ?? ["–", 0];
          return (
            <tr key={part.name}>
              <td>{visible(part.name)}</td><td class="num">{number(part.num_decisions)}</td>
              <td class="num">{percent(part.flips)}</td><td class="num">{number(part.kl, 4)}</td>
              <td class="num">{percent(part.greedy)}</td>
              <td><code dir="ltr">{visible(name)}</code> {signed(change, 4)}</td>
            </tr>
          );
        })}
      </Table>
    </Section>
  );
}

/** A table whose heads begin with # above numbers. */
function Table({ name, heads, children }: { name: string; heads: string[]; children: ComponentChildren }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={name}>
      <table>
        <thead>
          <tr>{heads.map((head) => <th key={head} scope="col" class={head.startsWith("#") ? "num" : undefined}>{head.replace("#", "")}</th>)}</tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}
