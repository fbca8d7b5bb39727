//go:build !gpu

package exec

import "github.com/euryale-ml/euryale/backend"

// productsOf returns what multiplies matrices on a queue.
func productsOf(q backend.Queue) (products, error) { return multiplies(q) }
