package backendtest

// pairwise returns rows of indices, the i-th below dims[i], in which every pair
// of values of every two columns occurs. It is the same on every call.
func pairwise(dims []int) [][]int {
	u := uncovered{dims: dims, left: map[pairOf]bool{}}
	for a := range dims {
		for b := a + 1; b < len(dims); b++ {
			for x := range dims[a] {
				for y := range dims[b] {
					u.order = append(u.order, pairOf{a, b, x, y})
					u.left[pairOf{a, b, x, y}] = true
				}
			}
		}
	}
	var rows [][]int
	for _, p := range u.order {
		if u.left[p] {
			rows = append(rows, u.row(p, len(rows)))
		}
	}
	return rows
}

// pairOf is values x and y in columns a < b.
type pairOf struct{ a, b, x, y int }

type uncovered struct {
	dims  []int
	order []pairOf
	left  map[pairOf]bool
}

// row builds a row around p, column by column with the value that covers most.
// Ties are broken by turn, so that values with nothing left to cover vary.
func (u *uncovered) row(p pairOf, turn int) []int {
	row := make([]int, len(u.dims))
	for i := range row {
		row[i] = -1
	}
	row[p.a], row[p.b] = p.x, p.y
	for i := range row {
		if row[i] < 0 {
			row[i] = u.best(row, i, turn)
		}
	}
	for a := range row {
		for b := a + 1; b < len(row); b++ {
			delete(u.left, pairOf{a, b, row[a], row[b]})
		}
	}
	return row
}

func (u *uncovered) best(row []int, i, turn int) int {
	best, most := 0, -1
	for k := range u.dims[i] {
		v := (k + turn) % u.dims[i]
		n := 0
		for j, w := range row {
			if w >= 0 && j != i && u.left[ordered(i, j, v, w)] {
				n++
			}
		}
		if n > most {
			best, most = v, n
		}
	}
	return best
}

func ordered(i, j, v, w int) pairOf {
	if i < j {
		return pairOf{i, j, v, w}
	}
	return pairOf{j, i, w, v}
}
