// A run is started, waited for, looked at, and its events are read: all of them say the same.
import { assert, client } from '../support.mjs'

const waited = await client.workflows.invoke('nightly', { input: { count: 2, note: 'flue' }, wait: 'result' })
assert.deepEqual(waited.result, { done: ['step-0 of flue', 'step-1 of flue'] })

const { runId } = await client.workflows.invoke('nightly', { input: { count: 2, note: 'flue' } })
assert.match(runId, /^run_/)
assert.notEqual(runId, waited.runId)

const streamed = []
for await (const event of client.runs.stream(runId)) streamed.push(event)
const pushed = []
for await (const event of client.runs.stream(runId, { live: 'sse' })) pushed.push(event)
const caughtUp = await client.runs.events(runId)

assert.deepEqual(streamed, caughtUp)
assert.deepEqual(pushed, caughtUp)
assert.equal(caughtUp[0].type, 'run_start')
assert.deepEqual(caughtUp[0].input, { count: 2, note: 'flue' })
const end = caughtUp.at(-1)
assert.equal(end.type, 'run_end')
assert.equal(end.isError, false)
assert.deepEqual(end.result, waited.result)
assert.deepEqual(caughtUp.filter((event) => event.type === 'log').map((event) => event.message), ['step 0', 'step 1'])
assert.ok(caughtUp.every((event) => event.runId === runId && event.v === 3))

const record = await client.runs.get(runId)
assert.equal(record.status, 'completed')
assert.equal(record.workflowName, 'nightly')
assert.deepEqual(record.result, waited.result)
assert.deepEqual(record.input, { count: 2, note: 'flue' })

const ran = await client.workflows.run('nightly', { input: { count: 1, note: 'once' } })
assert.deepEqual(ran.result, { done: ['step-0 of once'] })
