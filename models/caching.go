package models

import (
	"fmt"
	"strings"

	"gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"github.com/euryale-ml/euryale/layers"
	"github.com/euryale-ml/euryale/ops/nn"
	"github.com/euryale-ml/euryale/vm"
)

// caching is what a graph of generation has besides a model: caches of the keys and values of all
// positions so far, [batch*context, heads*d], of which the graph writes rows. It has some positions
// of some rows of the batch, which attend to all that the caches have before them. The zero value
// is a graph without caches.
type caching struct {
	context, batch int                      // positions of a row in the caches, and rows
	dtype          tensor.Dtype             // of the caches
	tensors        map[string]*tensor.Dense // of learnables and caches that there are, by name
	// slots are the rows of the caches to write, for each token, and places the tokens' positions.
	// lengths are how many positions each row has in the caches then.
	slots, places, lengths *gorgonia.Node
	which                  *gorgonia.Node // rows of the batch; nil for all, in their order
	ends                   *gorgonia.Node // rows' last tokens among all; nil with one token each
	options                []vm.Option
	caches                 int
	cosines, sines         *gorgonia.Node         // of the positions, once they are there
	masks                  map[int]*gorgonia.Node // by window
	positions              *layers.Tokens         // in documents, nil if each sample is one
}

// integers returns an input of n integers.
func integers(b *layers.Builder, name string, n int) *gorgonia.Node {
	return gorgonia.NewVector(b.Graph(), tensor.Int, gorgonia.WithShape(n),
		gorgonia.WithName(name),
		gorgonia.WithValue(tensor.New(tensor.Of(tensor.Int), tensor.WithShape(n))))
}

// pick returns the rows of a table, [rows, n...], that indices name for each of some samples:
// [samples, indices/samples, n...].
func pick(table, indices *gorgonia.Node, samples int) (*gorgonia.Node, error) {
	rows, err := nn.ByIndices(0, table, indices)
	if err != nil {
		return nil, err
	}
	s := rows.Shape()
	return gorgonia.Reshape(rows, append(tensor.Shape{samples, s[0] / samples}, s[1:]...))
}

// addPositions adds the rows of a learnable to the positions of x, [rows, positions, n].
func (c *caching) addPositions(b *layers.Builder, p, x layers.Node) layers.Node {
	return b.Apply("positions", func() (layers.Node, error) {
		rows, err := pick(p.Node, c.places, x.Shape()[0])
		if err != nil {
			return x, err
		}
		y, err := gorgonia.Add(x.Node, rows)
		return layers.Place(y, x), err
	})
}

// last returns the last position of each sample of x, [batch, positions, n]: [batch, 1, n].
func (c *caching) last(b *layers.Builder, x layers.Node) layers.Node {
	if c.ends == nil {
		return x
	}
	return b.Apply("last positions", func() (layers.Node, error) {
		s := x.Shape()
		y, err := gorgonia.Reshape(x.Node, tensor.Shape{s[0] * s[1], s[2]})
		if err == nil {
			y, err = pick(y, c.ends, s[0])
		}
		return layers.Place(y, x), err
	})
}

// cache writes x, [rows, positions, heads, d], into a cache, and returns the cache of these rows:
// [rows, context, heads, d].
func (c *caching) cache(b *layers.Builder, x layers.Node) layers.Node {
	return b.Apply("cache", func() (layers.Node, error) {
		s := x.Shape()
		shape := tensor.Shape{c.batch * c.context, s[2] * s[3]}
		name := fmt.Sprint("cache.", c.caches)
		c.caches++
		value := c.tensors[name]
		if value == nil {
			value = tensor.New(tensor.Of(c.dtype), tensor.WithShape(shape...))
		}
		cache := gorgonia.NewMatrix(b.Graph(), c.dtype, gorgonia.WithShape(shape...),
			gorgonia.WithName(name), gorgonia.WithValue(value))
		rows, err := gorgonia.Reshape(x.Node, tensor.Shape{s[0] * s[1], shape[1]})
		if err != nil {
			return x, err
		}
		next, err := nn.IndexCopy(0, cache, c.slots, rows)
		if err != nil {
			return x, err
		}
		c.options = append(c.options, vm.WithState(cache, next))
		if c.dtype != x.Dtype() {
			if next, err = nn.Cast(x.Dtype(), next); err != nil {
				return x, err
			}
		}
		if c.which != nil {
			next, err = gorgonia.Reshape(next, tensor.Shape{c.batch, c.context * shape[1]})
			if err == nil {
				next, err = nn.ByIndices(0, next, c.which)
			}
			if err != nil {
				return x, err
			}
		}
		y, err := gorgonia.Reshape(next, tensor.Shape{s[0], c.context, s[2], s[3]})
		return layers.Place(y, x), err
	})
}

func isCache(name string) bool { return strings.HasPrefix(name, "cache.") }
