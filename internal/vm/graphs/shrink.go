package graphs

import "slices"

// Shrink returns a smaller graph that still fails: values become operands of theirs of the same
// shape, or variables, as long as that is so.
func Shrink(g *Graph, fails func(*Graph) bool) *Graph {
	for smaller := true; smaller; {
		smaller = false
		for i := len(g.Values) - 1; i >= 0; i = min(i, len(g.Values)) - 1 {
			for _, try := range g.without(i) {
				if fails(try) {
					g, smaller = try, true
					break
				}
			}
		}
	}
	return g
}

// without returns graphs that lack the operation of a value.
func (g *Graph) without(i int) (tries []*Graph) {
	v := g.Values[i]
	if at := slices.Index(g.Kept, i); at >= 0 {
		try := g.clone()
		try.Kept = slices.Delete(try.Kept, at, at+1)
		tries = append(tries, try)
	}
	if v.Op == "" || !g.needed()[i] {
		return tries
	}
	for _, a := range v.Args {
		if !slices.Equal(g.Values[a].Shape, v.Shape) || g.Values[a].Limit > 0 {
			continue
		}
		try := g.clone()
		if i == len(g.Values)-1 {
			try.Values = try.Values[:a+1]
			try.Kept = slices.DeleteFunc(try.Kept, func(k int) bool { return k > a })
		}
		for k, of := range try.Kept {
			if of == i {
				try.Kept[k] = a
			}
		}
		for j := range try.Values {
			for k, of := range try.Values[j].Args {
				if of == i {
					try.Values[j].Args[k] = a
				}
			}
		}
		tries = append(tries, try)
	}
	if i < len(g.Values)-1 {
		try := g.clone()
		try.Values[i].Op, try.Values[i].Args, try.Values[i].flat = "", nil, false
		tries = append(tries, try)
	}
	return tries
}

func (g *Graph) clone() *Graph {
	c := &Graph{g.DType, slices.Clone(g.Values), slices.Clone(g.Kept), g.Whole}
	for i := range c.Values {
		c.Values[i].Args = slices.Clone(c.Values[i].Args)
	}
	return c
}
