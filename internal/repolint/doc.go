// Package repolint holds the tests of the repository itself: what may import what, that pages and
// comments cite what exists, that the Makefile explains its targets. They run at the root of the
// module. There is nothing to import here.
package repolint
