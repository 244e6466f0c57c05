import assert from 'node:assert/strict'
import { createFlueClient } from '@flue/sdk'

export { assert }

export const client = createFlueClient({ baseUrl: process.env.PERDURE_URL })

/** A name that no other scenario has. */
export const name = () => `customer-${crypto.randomUUID()}`
