// A run that fails: who waits gets an error that names it, and its record and its stream say why.
import { FlueApiError, FlueExecutionError } from '@flue/sdk'
import { assert, client } from '../support.mjs'

await assert.rejects(client.workflows.invoke('failing', { wait: 'result' }), (error) => {
  assert.ok(error instanceof FlueApiError)
  assert.equal(error.status, 500)
  return true
})
await assert.rejects(client.workflows.run('failing'), (error) => {
  assert.ok(error instanceof FlueExecutionError)
  assert.equal(error.failure, 'failed')
  return true
})
const { runId } = await client.workflows.invoke('failing')
for await (const event of client.runs.stream(runId)) if (event.type === 'run_end') assert.equal(event.isError, true)
const record = await client.runs.get(runId)
assert.equal(record.status, 'errored')
assert.deepEqual(record.error, { name: 'ValueError', message: 'This is how it fails.' })

await assert.rejects(client.workflows.invoke('unknown'), (error) => error instanceof FlueApiError && error.status === 404)
await assert.rejects(client.runs.get('run_unknown'), (error) => error instanceof FlueApiError && error.status === 404)
