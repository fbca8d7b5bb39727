package fuse

import "slices"

// rows is what is known of the values of a program that folds rows.
type rows struct {
	// alike are the values that are the same for all elements of a row.
	alike []bool
	// depth is how many folds of rows must be done, one after the other, before a value is known.
	depth []int
}

// rowsOf returns nil if the program folds no rows.
func rowsOf(p *Program) *rows {
	if len(p.Shape) == 0 || !slices.ContainsFunc(p.Code, func(c Instr) bool {
		return c.Op.FoldsRows()
	}) {
		return nil
	}
	r, last := &rows{}, len(p.Shape)-1
	for _, c := range p.Code {
		alike, depth := true, 0
		for _, x := range c.Args[:c.Op.Operands()] {
			alike, depth = alike && r.alike[x], max(depth, r.depth[x])
		}
		switch {
		case c.Op == Load:
			alike = p.Inputs[c.Args[0]].Strides[last] == 0
		case c.Op == Index:
			alike = p.Indices[c.Args[0]][last] == 0
		case c.Op.FoldsRows():
			alike, depth = true, depth+1
		}
		r.alike, r.depth = append(r.alike, alike), append(r.depth, depth)
	}
	return r
}
