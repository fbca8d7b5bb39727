package backend

// Lengths returns what rank r passes in elements, -1 where it is ignored.
func Lengths(c Collective, r, P, count int) (src, dst int) {
	return table[c.Kind].src(c.layout(), r, P, count), table[c.Kind].dst(c.layout(), r, P, count)
}
